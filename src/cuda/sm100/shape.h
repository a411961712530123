// The block's tile, its warps and what they share of registers, shared and tensor memory, with
// everything that follows from them at compile time.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/slab.h"
#include "cuda/core/tile_configuration.h"
#include "cuda/core/warp.h"
#include "cuda/load/loader.h"
#include "cuda/sm100/warp_accumulators.h"

namespace tilemoe::cuda::sm100 {

// Warps in this order: those that load, those that store, the one that multiplies. A warp reaches
// the lanes of tensor memory that its number modulo 4 names, so the storing ones begin at such a
// number.
constexpr int kStoringWarps = 4;
constexpr int kFirstStoringWarp = load::kProducerThreads / kWarp;
constexpr int kMultiplyingWarp = kFirstStoringWarp + kStoringWarps;
constexpr int kBlockThreads = (kMultiplyingWarp + 1) * kWarp;
static_assert(kFirstStoringWarp % 4 == 0);

constexpr int kRegisters = 65536 / kBlockThreads / 8 * 8;  // of a thread at most
static_assert(kRegisters >= 224, "an epilogue has 64 numbers, their words and their addresses");

constexpr int kSharedBytes = 227 * 1024;  // of a block
constexpr int kSwizzleAtom = 1024;        // 8 rows of 128 bytes: what shared tiles are aligned to

constexpr int kTensorMemoryColumns = 512;  // of a multiprocessor, and so of its one block
constexpr int kAccumulators = 2;           // one is multiplied into while the other is stored
constexpr int kAccumulatorColumns = kTensorMemoryColumns / kAccumulators;

// Two blocks of a cluster multiply together, as a pair: they have neighbouring rows of the same
// columns, and each brings half of B.
template <class Recipe_, TileConfiguration kTile>
struct TileShape {
  using Recipe = Recipe_;
  using Element = typename Recipe::A;  // of the operands
  using Out = typename Recipe::Out;    // that is stored
  static constexpr int BLOCK_M = kTile.block_m;
  static constexpr int BLOCK_N = kTile.block_n;
  static constexpr int BLOCK_K = 128 / sizeof(Element);  // a swizzled row of 128 bytes
  static constexpr int kCluster = kTile.cluster;
  static constexpr int kBlocks = kCluster;  // of a product
  // Of B, which each brings its part of.
  static constexpr int kRowsOfB = BLOCK_N / kBlocks;
  using OwnColumns = TileShape<Recipe, TileConfiguration{BLOCK_M, kRowsOfB}>;

  static constexpr int kWarpRows = BLOCK_M / kStoringWarps;  // one of each lane
  static constexpr int kSlabs = kWarpRows / slab::kRows;

  static_assert(sizeof(Element) == 2 && sizeof(typename Recipe::B) == 2, "products of 16 bits");
  static_assert(kTile.schedule == Schedule::kCooperative && (kBlocks == 1 || kBlocks == 2));
  static_assert(BLOCK_M == 128, "row i of a product is lane i of tensor memory");
  static_assert(BLOCK_N % kBatchColumns == 0 && BLOCK_N <= kAccumulatorColumns);

  // First row of this warp's slab, counted from the tile's first; its columns are the tile's.
  __device__ static int32_t slab_row(int index) { return slab_row(index, threadIdx.x); }
  __device__ static int32_t slab_row(int index, std::integral auto thread) {
    return static_cast<int32_t>(thread) / kWarp % kStoringWarps * kWarpRows + index * slab::kRows;
  }
};


}  // namespace tilemoe::cuda::sm100
