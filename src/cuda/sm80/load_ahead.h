// The loading side of a block: walks the tiles' k blocks in the order in which they are multiplied,
// some stages ahead, across the borders of tiles. So the next tile's operands land while this one's
// results are stored.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/ptx/cp_async.h"

namespace tilemoe::cuda::sm80 {

constexpr int kMostStages = 4;

// The tiles between the loading side and the warps' products: as many as may be under way when each
// has one k block. A tile is written before the barrier after which it is read.
constexpr int kTileSlots = kMostStages + 2;
using TileSlots = Tile[kTileSlots];
constexpr int32_t kNoTile = 0;  // k blocks: the order has come to its end

__device__ __forceinline__ int next_slot(int slot) {
  return slot + 1 == kTileSlots ? 0 : slot + 1;
}

template <class Gemm>
class LoadAhead {
 public:
  __device__ LoadAhead(const typename Gemm::Params& params, TileSlots& slots)
      : slots_(slots),
        load_a_(params.a, static_cast<int32_t>(threadIdx.x)),
        load_b_(params.b, static_cast<int32_t>(threadIdx.x)),
        order_(params.order) {
    next_tile();
  }

  // Starts the copies of the next k block to a stage: a group of cp.async, which is empty where no
  // k block is left. The tile after it is looked up at once, so that its first addresses are there
  // when they are needed.
  __device__ __forceinline__ void copy(uint32_t stage) {
    if (k_block_ < k_blocks_) {
      load_a_.copy(stage, k_block_);
      load_b_.copy(stage + Gemm::LoadA::Operand::kBytes, k_block_);
      if (++k_block_ == k_blocks_) next_tile();
    }
    ptx::cp_async_commit();
  }

 private:
  __device__ __forceinline__ void next_tile() {
    Tile tile{};
    k_block_ = 0;
    k_blocks_ = order_.next(tile) ? tile.k_blocks : kNoTile;
    tile.k_blocks = k_blocks_;
    if (threadIdx.x == 0) slots_[slot_] = tile;
    slot_ = next_slot(slot_);
    if (k_blocks_ == kNoTile) return;
    load_a_.begin(tile);
    load_b_.begin(tile);
  }

  TileSlots& slots_;
  typename Gemm::LoadA load_a_;
  typename Gemm::LoadB load_b_;
  typename Gemm::Order order_;
  int slot_ = 0;
  int32_t k_block_, k_blocks_;
};

}  // namespace tilemoe::cuda::sm80
