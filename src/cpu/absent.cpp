// Stands for the CPU backend in a build or a module without it.
#include "core/check.h"
#include "cpu/cpu_backend.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

[[noreturn]] void refuse() {
  TILEMOE_CHECK_SUPPORTED(
      false, "TileMoE was built without the CPU backend (TILEMOE_CPU=OFF); use the CUDA backend");
}

}  // namespace

const Backend& backend() {
  refuse();
}

int num_threads() noexcept {
  return 0;
}

void set_num_threads(int) {
  refuse();
}

}  // namespace tilemoe::cpu
