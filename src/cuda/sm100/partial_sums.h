// Accumulators of a tile in memory, in float32 and in the order of the threads that have them: for
// sums that several blocks have parts of.
#pragma once

#include <cstdint>

#include "cuda/core/slab.h"
#include "cuda/core/warp.h"
#include "cuda/sm100/shape.h"

namespace tilemoe::cuda::sm100 {

// A batch of columns of all of a warp's slabs.
template <class Shape>
using Columns = Slabs<Shape::kSlabs, kBatchColumns>;

// Of each tile, batches of columns; of each batch, the storing threads' accumulators 4 at a time.
template <class Shape>
struct PartialSums {
  static constexpr int kBatches = Shape::BLOCK_N / kBatchColumns;
  static constexpr int kVectors = kBatchColumns / 2 / 4;  // of a slab
  static constexpr int kThreads = kStoringWarps * kWarp;

  float4* data;

  __device__ __forceinline__ void write(int32_t tile, int32_t batch,
                                        const Columns<Shape>& D) const {
    float4* const to = of(tile, batch);
#pragma unroll
    for (int m = 0; m < Shape::kSlabs; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* const value = &D[m][4 * v];
        to[(m * kVectors + v) * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  __device__ __forceinline__ void add(int32_t tile, int32_t batch, Columns<Shape>& D) const {
    const float4* const from = of(tile, batch);
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
  // This thread's, of the storing ones of a product or of as many that have no others beside them.
  __device__ float4* of(int32_t tile, int32_t batch) const {
    return data +
           (static_cast<int64_t>(tile) * kBatches + batch) * (Shape::kSlabs * kVectors * kThreads) +
           threadIdx.x % kThreads;
  }
  static_assert(kFirstStoringWarp * kWarp % kThreads == 0);
};

}  // namespace tilemoe::cuda::sm100
