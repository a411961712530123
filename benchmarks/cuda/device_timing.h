// What benchmarks on the device share: buffers of random numbers and cold medians.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdint>
#include <stdexcept>
#include <vector>

#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe {

inline void check_cuda(cudaError_t error) {
  if (error != cudaSuccess) throw std::runtime_error(cudaGetErrorString(error));
}

class DeviceBuffer {
 public:
  explicit DeviceBuffer(size_t bytes) : bytes_(bytes) { check_cuda(cudaMalloc(&data_, bytes)); }
  ~DeviceBuffer() { cudaFree(data_); }
  DeviceBuffer(const DeviceBuffer&) = delete;
  void* data() const { return data_; }
  size_t bytes() const { return bytes_; }
  template <class T>
  void upload(const std::vector<T>& values) {
    check_cuda(cudaMemcpy(data_, values.data(), values.size() * sizeof(T), cudaMemcpyHostToDevice));
  }
  // Copies of one random block of a prime number of elements.
  void fill(double scale) {
    constexpr size_t kElements = 4194301;
    static const std::vector<float> normals = [] {
      verify::Random random(1, 1);
      std::vector<float> values(kElements);
      for (float& v : values) v = static_cast<float>(random.normal());
      return values;
    }();
    std::vector<uint16_t> block(kElements);
    for (size_t i = 0; i < kElements; ++i)
      block[i] = verify::encode_16bit(DType::kBFloat16, scale * static_cast<double>(normals[i]));
    const size_t block_bytes = kElements * 2;
    check_cuda(
        cudaMemcpy(data_, block.data(), std::min(block_bytes, bytes_), cudaMemcpyHostToDevice));
    for (size_t have = block_bytes; have < bytes_; have *= 2)
      check_cuda(cudaMemcpy(static_cast<char*>(data_) + have, data_, std::min(have, bytes_ - have),
                            cudaMemcpyDeviceToDevice));
  }

 private:
  size_t bytes_;
  void* data_ = nullptr;
};

// Milliseconds, the median; the cache is overwritten before each run.
template <int kRuns = 15, int kWarmUp = 2, class Run>
double median_ms(const DeviceBuffer& flush, const Run& run) {
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kWarmUp + kRuns; ++i) {
    check_cuda(cudaMemsetAsync(flush.data(), i, flush.bytes()));
    check_cuda(cudaEventRecord(begin));
    run();
    check_cuda(cudaEventRecord(end));
    check_cuda(cudaEventSynchronize(end));
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end));
    if (i >= kWarmUp) times.push_back(ms);
  }
  check_cuda(cudaEventDestroy(begin));
  check_cuda(cudaEventDestroy(end));
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return static_cast<double>(times[kRuns / 2]);
}

}  // namespace tilemoe
