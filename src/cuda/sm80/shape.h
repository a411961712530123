// The block's tile and how its warps share it, with everything that follows from them at compile
// time.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/slab.h"
#include "cuda/core/tile_configuration.h"
#include "cuda/core/warp.h"

namespace tilemoe::cuda::sm80 {

// Each warp has up to 64 rows by 64 columns of the tile: as many products for each byte it reads of
// shared memory as registers allow, and of ds's groups exactly one.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  using Out = typename Recipe::Out;    // that is stored
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr int kCluster = 1;
  static constexpr bool kFewRows = BLOCK_M < 64;

  static constexpr int kWarpRows = BLOCK_M < 64 ? BLOCK_M : 64;
  // Of 192 columns eight warps have 48 each: six of 64 would leave two schedulers one warp. Few rows
  // are waited for rather than multiplied, by as many warps as are of use.
  static constexpr int kWarpColumns = BLOCK_M <= 16                         ? 16
                                      : BLOCK_N % 64 != 0 || BLOCK_N == 192 ? 48
                                                                            : 64;
  static constexpr int kWarpsAcross = BLOCK_N / kWarpColumns;
  static constexpr int kThreads = BLOCK_M / kWarpRows * kWarpsAcross * kWarp;
  static constexpr int kSlabs = kWarpRows / slab::kRows;

  static_assert(sizeof(Element) == 2 && sizeof(typename Recipe::B) == 2, "products of 16 bits");
  static_assert(kTile.schedule == Schedule::kCooperative && kTile.cluster == 1);
  static_assert(BLOCK_M % kWarpRows == 0 && kWarpRows % slab::kRows == 0 &&
                BLOCK_N % kWarpColumns == 0);

  // First row and column of this warp's slab, counted from the tile's first.
  __device__ static int32_t slab_row(int index) { return slab_row(index, threadIdx.x); }
  __device__ static int32_t slab_row(int index, std::integral auto thread) {
    return static_cast<int32_t>(thread) / kWarp / kWarpsAcross * kWarpRows + index * slab::kRows;
  }
  __device__ static int32_t slab_column() { return warp_across() * kWarpColumns; }

  // Which of the warps across the tile this one is. A scheduler has every fourth warp: those of the
  // same rows have one each, and so have those of one half of the columns, so that all schedulers
  // have work in a tile of which half the rows or columns are not there.
  __device__ static int32_t warp_across() {
    const auto warp = static_cast<int32_t>(threadIdx.x) / kWarp;
    if constexpr (kWarpsAcross == 4)
      return warp % 4 ^ warp / 4 % 2 * 2;
    else
      return warp % kWarpsAcross;
  }
};

}  // namespace tilemoe::cuda::sm80
