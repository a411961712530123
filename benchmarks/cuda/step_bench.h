// What benchmarks of single steps share: the configurations, buffers of random numbers, a random
// routing, cold medians.
#pragma once

#include <cuda_runtime_api.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <numeric>
#include <stdexcept>
#include <string>
#include <vector>

#include "backend.h"
#include "cuda/backend.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe {

struct Config {
  const char* name;
  int64_t T, d, n, E, K;
};
inline constexpr Config kConfigs[] = {
    {"7b-n256", 24576, 1536, 256, 128, 8},    {"7b-n1024", 24576, 1536, 1024, 32, 2},
    {"30b-n256", 32768, 4096, 256, 256, 16},  {"30b-n1024", 32768, 4096, 1024, 64, 4},
    {"olmoe", 32768, 2048, 1024, 64, 8},      {"qwen3-235b", 32768, 4096, 1536, 128, 8},
    {"gpt-oss-20b", 32768, 2880, 2880, 32, 4}};

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

inline tilemoe_tensor tensor(const DeviceBuffer& buffer, std::vector<int64_t> shape) {
  tilemoe_tensor view{};
  view.data = buffer.data();
  view.dtype = TILEMOE_BFLOAT16;
  view.ndim = static_cast<int32_t>(shape.size());
  int64_t stride = 1;
  for (size_t i = shape.size(); i-- > 0;) {
    view.shape[i] = shape[i];
    view.stride[i] = stride;
    stride *= shape[i];
  }
  return view;
}

// K distinct experts a token, uniformly.
struct RandomRouting {
  std::vector<int32_t> offsets, tokens, pair_row;
  std::vector<float> scores;

  explicit RandomRouting(const Config& c) {
    verify::Random random(5, 5);
    std::vector<std::vector<int32_t>> pairs_of(static_cast<size_t>(c.E));
    std::vector<int32_t> ids(static_cast<size_t>(c.E));
    std::iota(ids.begin(), ids.end(), 0);
    for (int64_t t = 0; t < c.T; ++t)
      for (int64_t k = 0; k < c.K; ++k) {
        const auto slot = static_cast<size_t>(k);
        std::swap(ids[slot], ids[static_cast<size_t>(k + random.below(c.E - k))]);
        pairs_of[static_cast<size_t>(ids[slot])].push_back(static_cast<int32_t>(t * c.K + k));
      }
    pair_row.resize(static_cast<size_t>(c.T * c.K));
    offsets.push_back(0);
    for (const auto& pairs : pairs_of) {
      for (const int32_t pair : pairs) {
        pair_row[static_cast<size_t>(pair)] = static_cast<int32_t>(tokens.size());
        tokens.push_back(pair / static_cast<int32_t>(c.K));
        scores.push_back(1.f / static_cast<float>(c.K));
      }
      offsets.push_back(static_cast<int32_t>(tokens.size()));
    }
  }
};

// Milliseconds, the median; the cache is overwritten before each run.
template <class Run>
double median_ms(const DeviceBuffer& flush, const Run& run) {
  constexpr int kRuns = 15;
  cudaEvent_t begin, end;
  check_cuda(cudaEventCreate(&begin));
  check_cuda(cudaEventCreate(&end));
  std::vector<float> times;
  for (int i = 0; i < kRuns + 2; ++i) {
    check_cuda(cudaMemsetAsync(flush.data(), i, flush.bytes()));
    check_cuda(cudaEventRecord(begin));
    run();
    check_cuda(cudaEventRecord(end));
    check_cuda(cudaEventSynchronize(end));
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end));
    if (i >= 2) times.push_back(ms);
  }
  std::nth_element(times.begin(), times.begin() + kRuns / 2, times.end());
  return static_cast<double>(times[kRuns / 2]);
}

inline void report(const char* config, const char* step, const char* tile, double ms, double flop,
                   double bytes) {
  const double limit = std::max(flop / 798e12, bytes / 3.0e12) * 1e3;
  std::printf("%-12s %-6s %-16s %8.4f ms %7.1f TFLOP/s %7.1f GB/s  limit %8.4f (%.2f)\n", config,
              step, tile, ms, flop / ms * 1e-9, bytes / ms * 1e-6, limit, limit / ms);
  std::fflush(stdout);
}

// The configurations named by the arguments, all without any: bench(config) for each.
template <class Bench>
int bench_configs(int argc, char** argv, const Bench& bench) {
  try {
    std::printf("%s\n", cuda::backend().description().c_str());
    for (const Config& config : kConfigs) {
      const auto wanted = [&](const char* name) { return std::strcmp(name, config.name) == 0; };
      if (argc == 1 || std::any_of(argv + 1, argv + argc, wanted)) bench(config);
    }
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
  return 0;
}

}  // namespace tilemoe
