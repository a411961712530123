#include "cpu/cpu_backend.h"

#include <dnnl.h>

#include <sstream>

#include "cpu/elementwise.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {

Backend& backend() {
  // Never destroyed: at exit() other threads may still compute.
  static Backend& backend = *new CpuBackend;
  return backend;
}

CpuBackend::CpuBackend() {
  num_threads();
}

std::string CpuBackend::description() const {
  const dnnl_version_t* onednn = dnnl_version();
  const int threads = num_threads();
  std::ostringstream text;
  text << "cpu: " << threads << (threads == 1 ? " thread, " : " threads, ") << vector_target()
       << ", oneDNN " << onednn->major << "." << onednn->minor << "." << onednn->patch;
  return text.str();
}

// Everything that the interface accepts runs here.
void CpuBackend::check_supported(const tilemoe_experts&) const {}

size_t CpuBackend::scratch_bytes(Step step, const tilemoe_experts& experts,
                                 const ScratchSizes& sizes) const {
  return step == Step::kBiasGradient ? 0 : StepScratch::bytes(experts, sizes.capacity);
}

}  // namespace tilemoe::cpu
