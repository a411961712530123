// The loading side of a warp: copies its part of the tiles' k blocks in the order in which they are
// multiplied, some stages ahead, across the borders of tiles. So the next tile's operands land while
// this one's results are stored.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/core/tile.h"
#include "cuda/core/warp.h"
#include "cuda/sm80/ring.h"
#include "cuda/sm80/tile_line.h"

namespace tilemoe::cuda::sm80 {

template <class Gemm>
class LoadAhead {
 public:
  using Line = typename Gemm::Line;

  __device__ LoadAhead(const typename Gemm::Params& params, const typename Gemm::Ring& ring,
                       Line& line)
      : line_(line),
        at_(ring.first()),
        load_a_(params.a, static_cast<int32_t>(threadIdx.x)),
        load_b_(params.b, static_cast<int32_t>(threadIdx.x)) {
    if (is_first_warp()) {
      line_.begin(params.order);
      line_.find_next(next_);
    }
    begin_tile();
  }

  // The next k block's, if there is one, to the stage after the last. The tile that follows its own
  // last k block is looked up at once, so that its first addresses are there when they are needed.
  __device__ __forceinline__ void copy(const typename Gemm::Ring& ring) {
    copy_of<true, true>(ring);
  }

  // The first `count` k blocks: their weights while the kernel before still runs, then their rows,
  // which it writes.
  __device__ __forceinline__ void copy_weights_first(const typename Gemm::Ring& ring,
                                                     int32_t count) {
    LoadAhead rows = *this;  // goes the same way again
    for (int32_t i = 0; i < count; ++i) copy_of<false, true>(ring);
    wait_for_previous();
    for (int32_t i = 0; i < count; ++i) rows.template copy_of<true, false>(ring);
  }

 private:
  // Who copies B looks for the tiles, who copies A fills the stages.
  template <bool kA, bool kB>
  __device__ __forceinline__ void copy_of(const typename Gemm::Ring& ring) {
    if (k_blocks_ == kNoTile) return;
    ring.wait_empty(at_);
    if constexpr (kA) load_a_.copy(at_.stage, k_block_);
    if constexpr (kB) load_b_.copy(at_.stage + Gemm::LoadA::Operand::kBytes, k_block_);
    if constexpr (kA) ring.fill(at_);
    ring.advance(at_);
    if (++k_block_ < k_blocks_) return;
    if constexpr (kB)
      if (is_first_warp()) line_.find_next(next_);
    begin_tile();
  }

  __device__ static bool is_first_warp() { return threadIdx.x < kWarp; }

  __device__ __forceinline__ void begin_tile() {
    const Tile tile = line_.wait(next_);
    line_.advance(next_);
    k_block_ = 0;
    k_blocks_ = tile.k_blocks;
    if (k_blocks_ == kNoTile) return;
    load_a_.begin(tile);
    load_b_.begin(tile);
  }

  Line& line_;
  LinePosition next_;  // the tile's place that is asked for next
  RingPosition at_;
  typename Gemm::LoadA load_a_;
  typename Gemm::LoadB load_b_;
  int32_t k_block_, k_blocks_;
};

}  // namespace tilemoe::cuda::sm80
