// A tile's end, batch by batch of a warp's slabs, as a loop: written out it would be many times as
// many instructions, which a multiprocessor fetches anew for each tile.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/sm100/warp_accumulators.h"

namespace tilemoe::cuda::sm100 {

// Calls body(m, column) of each slab that has rows and each batch of columns of it, of kColumns from
// `first` on, that has columns before `end`.
template <class Shape, int kColumns = Shape::BLOCK_N, int kStep = kBatchColumns, class Body>
__device__ __forceinline__ void for_each_batch(const Tile& tile, int32_t first, int32_t end,
                                               const Body& body) {
  const int32_t last = min(first + kColumns, end);
#pragma unroll 1
  for (int m = 0; m < Shape::kSlabs; ++m) {
    if (tile.row_begin + Shape::slab_row(m) >= tile.row_end) return;
#pragma unroll 1
    for (int32_t column = first; column < last; column += kStep) body(m, column);
  }
}

}  // namespace tilemoe::cuda::sm100
