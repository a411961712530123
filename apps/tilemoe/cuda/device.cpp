#include "cuda/device.h"

#include <algorithm>
#include <stdexcept>

namespace tilemoe::app {
namespace {

std::string dotted(int version) {
  return std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

void check_cuda(cudaError_t error, const char* what) {
  if (error != cudaSuccess)
    throw std::runtime_error(std::string(what) + ": " + cudaGetErrorName(error) + ": " +
                             cudaGetErrorString(error));
}

DeviceBuffer::DeviceBuffer(size_t bytes) : bytes_(bytes) {
  void* memory = nullptr;
  check_cuda(cudaMalloc(&memory, std::max(bytes, size_t{1})), "cudaMalloc");
  data_.reset(memory);
}

void DeviceBuffer::write(const void* from_host, size_t bytes) {
  check_cuda(cudaMemcpy(data(), from_host, bytes, cudaMemcpyHostToDevice), "a copy to the GPU");
}

void DeviceBuffer::read(void* to_host, size_t bytes) const {
  check_cuda(cudaMemcpy(to_host, data(), bytes, cudaMemcpyDeviceToHost), "a copy from the GPU");
}

Event::Event() {
  check_cuda(cudaEventCreate(&event_), "cudaEventCreate");
}

double Event::ms_since(const Event& begin) const {
  float ms = 0;
  check_cuda(cudaEventSynchronize(event_), "the work before an event");
  check_cuda(cudaEventElapsedTime(&ms, begin.event_, event_), "cudaEventElapsedTime");
  return static_cast<double>(ms);
}

void DeviceCacheFlush::operator()() const {
  check_cuda(cudaMemsetAsync(buffer_.data(), 0, buffer_.bytes()), "cudaMemsetAsync");
}

std::string gpu_name() {
  int index = 0;
  cudaDeviceProp properties{};
  check_cuda(cudaGetDevice(&index), "cudaGetDevice");
  check_cuda(cudaGetDeviceProperties(&properties, index), "cudaGetDeviceProperties");
  return properties.name;
}

std::string driver_version() {
  int version = 0;
  check_cuda(cudaDriverGetVersion(&version), "cudaDriverGetVersion");
  return dotted(version);
}

std::string runtime_version() {
  int version = 0;
  check_cuda(cudaRuntimeGetVersion(&version), "cudaRuntimeGetVersion");
  return dotted(version);
}

}  // namespace tilemoe::app
