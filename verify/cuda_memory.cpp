// The current GPU's memory, for builds with the CUDA backend.
#include <cuda_runtime_api.h>

#include <stdexcept>
#include <string>

#include "memory.h"

namespace tilemoe::verify {
namespace {

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// The copies wait for the default stream, where the cases run: an error of a kernel is thrown here.
class CudaMemory final : public Memory {
 public:
  Device device() const override { return Device::kCuda; }
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    check_cuda(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice), "a copy to the GPU");
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    check_cuda(cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost), "a copy from the GPU");
  }
};

}  // namespace

Memory& cuda_memory() {
  static CudaMemory memory;
  return memory;
}

}  // namespace tilemoe::verify
