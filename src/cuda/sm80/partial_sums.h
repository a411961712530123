// Accumulators of a tile in memory, in float32 and in the order of the threads that have them: for
// sums that several blocks have parts of.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

// Of each tile, what each column of warps has; of that, the threads' accumulators 4 at a time.
template <class Shape>
struct PartialSums {
  static constexpr int kVectors = Shape::kWarpColumns / 2 / 4;            // of a slab
  static constexpr int kThreads = Shape::kThreads / Shape::kWarpsAcross;  // of such a column
  static constexpr int kAcross = Shape::kWarpsAcross;

  float4* data;

  __device__ __forceinline__ void write(int32_t tile, const Accumulators<Shape>& D) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t warp = thread / kWarp;
    float4* const to = of(tile, Shape::warp_across()) + warp / kAcross * kWarp + thread % kWarp;
#pragma unroll
    for (int m = 0; m < Shape::kSlabs; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* const value = &D[m][4 * v];
        to[(m * kVectors + v) * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  // Adds a column of warps to the accumulators of a block that has no other.
  __device__ __forceinline__ void add(int32_t tile, int32_t across, Accumulators<Shape>& D) const {
    const float4* const from = of(tile, across) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < Shape::kSlabs; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 part = from[(m * kVectors + v) * kThreads];
        float* const value = &D[m][4 * v];
        value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
      }
  }

 private:
  __device__ float4* of(int32_t tile, int32_t across) const {
    return data +
           (static_cast<int64_t>(tile) * kAcross + across) * (Shape::kSlabs * kVectors * kThreads);
  }
};

}  // namespace tilemoe::cuda::sm80
