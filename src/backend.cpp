#include "backend.h"

#include "check.h"
#include "cpu/backend.h"
#include "cpu/thread_pool.h"
#include "cuda/backend.h"

namespace tilemoe {

Backend& cpu_backend() {
  return cpu::backend();
}

Backend& backend_for(tilemoe_device device) {
  TILEMOE_CHECK(device == TILEMOE_CPU || device == TILEMOE_CUDA,
                "device is " << static_cast<int>(device) << ", expected cpu (0) or cuda (1)");
  return device == TILEMOE_CUDA ? cuda::backend() : cpu_backend();
}

void set_num_threads(int threads) {
  cpu::set_num_threads(threads);
}
int num_threads() noexcept {
  return cpu::num_threads();
}

}  // namespace tilemoe
