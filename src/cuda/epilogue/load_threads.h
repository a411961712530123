// Reads rows of a 16-bit matrix as slabs have them, by nothing that a GPU generation has of its own:
// the mirror image of epilogue/store_threads.h.
#pragma once

#include <cstdint>

#include "cuda/core/slab.h"
#include "cuda/epilogue/store_threads.h"
#include "cuda/ptx/vector_copy.h"

namespace tilemoe::cuda {

// 32 columns of a slab's upper and lower 8 rows, as they come from memory: a lane has 8 columns of
// either. Columns and rows that are not there are zeros.
struct LoadedColumns {
  uint4 row[2];
};

template <class Element>
__device__ __forceinline__ LoadedColumns load_columns(const Element* slab_row, int64_t row_stride,
                                                      const bool (&row_exists)[2],
                                                      int32_t columns_left) {
  constexpr int kGroup = 8;
  const int32_t lane = slab::lane(), column = lane % 4 * kGroup;
  const Element* const first = slab_row + lane / 4 * row_stride + column;
  LoadedColumns loaded{};
#pragma unroll
  for (int half = 0; half < 2; ++half)
    if (row_exists[half] && column < columns_left)
      loaded.row[half] = ptx::load_global_16(first + half * (slab::kRows / 2) * row_stride);
  return loaded;
}

// As a slab has them: words[j][half] has numbers 4 j + 2 half and the next. All lanes of a warp call
// it.
__device__ __forceinline__ void words_of_columns(const LoadedColumns& loaded,
                                                 uint32_t (&words)[4][2]) {
#pragma unroll
  for (int half = 0; half < 2; ++half) {
    const uint4& row = loaded.row[half];
    const uint4 word = words_of_group({row.x, row.y, row.z, row.w}, slab::lane());
    words[0][half] = word.x, words[1][half] = word.y, words[2][half] = word.z,
    words[3][half] = word.w;
  }
}

}  // namespace tilemoe::cuda
