// Accumulators of a tile in memory, in float32 and in the order of the threads that have them: for
// sums that several blocks have parts of.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

// Of each tile, slices of kSlice columns; of each slice, the threads' accumulators 4 at a time.
template <class Shape>
struct PartialSums {
  static constexpr int kSlice = 64;
  static constexpr int kSlices = Shape::BLOCK_N / kSlice;
  static constexpr int kVectors = kSlice / 2 / 4;  // of a thread and slice
  static constexpr int kThreads = kConsumers * kWarpgroup;
  static constexpr size_t kTileBytes = size_t{kSlices} * kVectors * kThreads * sizeof(float4);
  static_assert(Shape::kSlabs == 1 && Shape::kSchedule == Schedule::kCooperative);

  float4* data;

  __device__ __forceinline__ void write(int32_t tile, const Accumulators<Shape>& D) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* value = &D[0][slice * (kSlice / 2) + 4 * v];
        of(tile, slice)[v * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  // Adds one slice to the accumulators of a tile that is as wide.
  __device__ __forceinline__ void add(int32_t tile, int32_t slice, float (&D)[kSlice / 2]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float4 part = of(tile, slice)[v * kThreads];
      D[4 * v] += part.x, D[4 * v + 1] += part.y, D[4 * v + 2] += part.z, D[4 * v + 3] += part.w;
    }
  }

 private:
  // A consumer's thread; the producer's come before.
  __device__ float4* of(int32_t tile, int32_t slice) const {
    return data + (static_cast<int64_t>(tile) * kSlices + slice) * (kVectors * kThreads) +
           threadIdx.x - kWarpgroup;
  }
};

}  // namespace tilemoe::cuda::sm90
