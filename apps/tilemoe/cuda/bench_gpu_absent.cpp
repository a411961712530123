// Stands for the bench on a GPU in a build without the CUDA backend.
#include <stdexcept>

#include "cuda/bench_gpu.h"

namespace tilemoe::app {

nlohmann::json bench_on_gpu(const GpuBench&) {
  throw std::runtime_error("this build has no CUDA backend: use the CPU backend");
}

}  // namespace tilemoe::app
