// The current GPU's memory, for builds with the CUDA backend.
#include <cuda_runtime_api.h>

#include <atomic>
#include <stdexcept>
#include <string>
#include <thread>

#include "memory.h"

namespace tilemoe::verify {
namespace {

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

// Copies back and forth on a separate stream.
class CopyingStream final : public OtherWork {
 public:
  CopyingStream() {
    check_cuda(cudaStreamCreateWithFlags(&stream_, cudaStreamNonBlocking), "cudaStreamCreate");
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, 2 * kBytes), "cudaMalloc");
    memory_ = static_cast<std::byte*>(memory);
    int device = 0;
    check_cuda(cudaGetDevice(&device), "cudaGetDevice");
    copier_ = std::thread([this, device] {
      cudaSetDevice(device);
      while (!stop_.load(std::memory_order_relaxed)) {
        for (int i = 0; i < 8; ++i)
          cudaMemcpyAsync(memory_ + (i % 2) * kBytes, memory_ + (1 - i % 2) * kBytes, kBytes,
                          cudaMemcpyDeviceToDevice, stream_);
        cudaStreamSynchronize(stream_);
      }
    });
  }
  ~CopyingStream() override {
    stop_ = true;
    copier_.join();
    cudaFree(memory_);
    cudaStreamDestroy(stream_);
  }

 private:
  static constexpr size_t kBytes = size_t{64} << 20;
  cudaStream_t stream_ = nullptr;
  std::byte* memory_ = nullptr;
  std::atomic<bool> stop_{false};
  std::thread copier_;
};

// The copies wait for the default stream, on which the cases run: a kernel's error is thrown here.
class CudaMemory final : public Memory {
 public:
  Device device() const override { return Device::kCuda; }
  void* allocate(size_t bytes) override {
    void* memory = nullptr;
    check_cuda(cudaMalloc(&memory, bytes), "cudaMalloc");
    return memory;
  }
  void release(void* memory) override { cudaFree(memory); }
  // A copy from pageable memory returns when it is staged: another stream would not wait for it.
  void copy_in(void* to, const void* from_host, size_t bytes) override {
    check_cuda(cudaMemcpy(to, from_host, bytes, cudaMemcpyHostToDevice), "a copy to the GPU");
    check_cuda(cudaStreamSynchronize(nullptr), "a copy to the GPU");
  }
  void copy_out(void* to_host, const void* from, size_t bytes) override {
    check_cuda(cudaMemcpy(to_host, from, bytes, cudaMemcpyDeviceToHost), "a copy from the GPU");
  }
  std::unique_ptr<OtherWork> do_other_work() override { return std::make_unique<CopyingStream>(); }
};

}  // namespace

Memory& cuda_memory() {
  static CudaMemory memory;
  return memory;
}

}  // namespace tilemoe::verify
