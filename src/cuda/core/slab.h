// The slab law: a warp has its part of a product as slabs of 16 rows by N columns, in the order of
// mma.m16n8's C fragment, one slab under the other. wgmma leaves them so, and mma.sync does; from
// tensor memory they can be read so. The arithmetic of an epilogue is written for slabs; a kit says
// where a warp's slabs lie in the tile (Shape::slab_row()), and when it is done.
#pragma once

#include <cstdint>

#include "cuda/core/warp.h"

namespace tilemoe::cuda {

// Number 4 j + i of a lane: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
template <int kSlabs, int kColumns>
using Slabs = float[kSlabs][kColumns / 2];

namespace slab {

constexpr int kRows = 16;

__device__ __forceinline__ int32_t lane() {
  return static_cast<int32_t>(threadIdx.x % kWarp);
}
// Of this lane's numbers 4 j + 2 half and the next.
__device__ __forceinline__ int32_t row(int half) {
  return lane() / 4 + 8 * half;
}
// Of this lane's numbers 4 j and 4 j + 2; the column after it is that of the next.
__device__ __forceinline__ int32_t column(int j = 0) {
  return 8 * j + lane() % 4 * 2;
}

}  // namespace slab

}  // namespace tilemoe::cuda
