// An expert's rows cut into chunks of equal length, for kernels that sum over rows: a first kernel
// sums each chunk, a second adds an expert's chunks in order, so the same bits on every run.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"

namespace tilemoe::cuda {

// Chunks have numbers that need no prefix sum: chunk i of expert e is offsets[e] / rows + e + i.
// They are distinct, ascend, and stay below capacity / rows + E.
__host__ __device__ inline int64_t max_chunks(int64_t capacity, int64_t E, int32_t rows) {
  return capacity / rows + E;
}
__device__ __forceinline__ int32_t first_chunk(const int32_t* offsets, int32_t e, int32_t rows) {
  return offsets[e] / rows + e;
}
// Chunks of an expert with this number of rows.
__device__ __forceinline__ int32_t count_chunks(int32_t rows_of_expert, int32_t rows) {
  return rows_of_expert / rows + (rows_of_expert % rows != 0);
}

struct RowChunk {
  int32_t expert;
  int64_t begin;
  int32_t rows;  // 0 or less: there is no such chunk
};

// Called by whole warps: their lanes read the experts' offsets side by side.
__device__ __forceinline__ RowChunk find_chunk(const int32_t* offsets, int32_t E, int32_t rows,
                                               int32_t chunk) {
  int32_t begun = 0;  // experts of this lane whose first chunk is not after `chunk`
  for (auto e = static_cast<int32_t>(threadIdx.x % kWarp); e < E; e += kWarp)
    if (first_chunk(offsets, e, rows) <= chunk) ++begun;
  const auto expert = static_cast<int32_t>(__reduce_add_sync(kAllLanes, begun)) - 1;
  const int32_t in_expert = chunk - first_chunk(offsets, expert, rows);
  const int64_t begin = offsets[expert] + int64_t{in_expert} * rows;
  return {expert, begin, static_cast<int32_t>(min(int64_t{rows}, offsets[expert + 1] - begin))};
}

}  // namespace tilemoe::cuda
