// Shared by the trainer's kernels: grids over elements and rows, and sums in a fixed order.
#pragma once

#include <cuda_runtime.h>

#include <cstdint>

#include "cuda/device.h"

namespace tilemoe::train::cuda {

inline constexpr unsigned kWarp = 32;
inline constexpr unsigned kThreads = 256;  // of a CTA
inline constexpr unsigned kWarps = kThreads / kWarp;

// Rows that one thread adds up, in their order, where a gradient is summed over the batch: with the
// parts' sums it is what ops/partial_sums.h does on the CPU.
inline constexpr int64_t kRowsPerPart = 128;

inline unsigned blocks_for(int64_t items, int64_t per_block) {
  return static_cast<unsigned>((items + per_block - 1) / per_block);
}

inline void check_launch(const char* kernel) {
  app::check_cuda(cudaGetLastError(), kernel);
}

__device__ inline int64_t global_thread() {
  return static_cast<int64_t>(blockIdx.x) * blockDim.x + threadIdx.x;
}
__device__ inline int64_t global_warp() {
  return global_thread() / kWarp;
}
__device__ inline unsigned lane() {
  return threadIdx.x % kWarp;
}

// The same value in every lane.
__device__ inline float warp_sum(float value) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2)
    value += __shfl_xor_sync(~0u, value, offset);
  return value;
}
__device__ inline float warp_max(float value) {
  for (unsigned offset = kWarp / 2; offset > 0; offset /= 2)
    value = fmaxf(value, __shfl_xor_sync(~0u, value, offset));
  return value;
}

// out[i] = sum over parts, in their order, of partials[part][i]
void sum_partials(const float* partials, int64_t parts, float* out, int64_t width);

}  // namespace tilemoe::train::cuda
