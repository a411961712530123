#include "cuda/doctor_gpu.h"

#include <cuda_runtime_api.h>

#include <stdexcept>

namespace tilemoe::app {

void use_gpu(int index) {
  int count = 0;
  if (cudaGetDeviceCount(&count) != cudaSuccess) count = 0;
  if (index >= count)
    throw std::runtime_error("--device cuda:" + std::to_string(index) + ": this machine has " +
                             std::to_string(count) + " GPUs, the first is cuda:0");
  if (const cudaError_t error = cudaSetDevice(index); error != cudaSuccess)
    throw std::runtime_error(std::string("cudaSetDevice: ") + cudaGetErrorString(error));
}

std::string what_the_build_lacks() {
  return "";
}

}  // namespace tilemoe::app
