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
  using Ring = typename Gemm::Ring;

  __device__ LoadAhead(const typename Gemm::Params& params, Line& line)
      : line_(line),
        load_a_(params.a, static_cast<int32_t>(threadIdx.x)),
        load_b_(params.b, static_cast<int32_t>(threadIdx.x)) {
    if (is_first_warp()) {
      line_.begin(params.order);
      line_.find_next(next_);
    }
    begin_tile();
  }

  // The next k block's, if there is one, to the stage after the last.
  __device__ __forceinline__ void copy_next(const Ring& ring) { copy_of<true, true>(ring); }

  // The same in parts, to stand among products. First the copies, once the stage has been read. Who
  // copies A fills the stages.
  template <bool kA = true, bool kB = true>
  __device__ __forceinline__ void copy(const Ring& ring) const {
    if (left_ <= 0) return;
    ring.wait_empty(at_);
    const uint32_t stage = ring.address(at_);
    if constexpr (kA) load_a_.copy(stage, left_);
    if constexpr (kB) load_b_.copy(stage + Gemm::LoadA::Operand::kBytes, left_);
    if constexpr (kA) ring.fill(at_);
  }
  // On to the next k block,
  __device__ __forceinline__ void advance(const Ring& ring) {
    load_a_.advance(left_);
    load_b_.advance(left_);
    ring.advance(at_);
    --left_;
  }
  // and where there is none left, to the next tile's. That one is looked up at once, so that its
  // first addresses are there when they are needed.
  template <bool kLooks = true>
  __device__ __forceinline__ void find_tile() {
    if (left_ != 0) return;
    if constexpr (kLooks)
      if (is_first_warp()) line_.find_next(next_);
    begin_tile();
  }

  // The first `count` k blocks: their weights while the kernel before still runs, then their rows,
  // which it writes. Who copies B looks for the tiles.
  __device__ __forceinline__ void copy_weights_first(const Ring& ring, int32_t count) {
    LoadAhead rows = *this;  // goes the same way again
    for (int32_t i = 0; i < count; ++i) copy_of<false, true>(ring);
    wait_for_previous();
    for (int32_t i = 0; i < count; ++i) rows.template copy_of<true, false>(ring);
  }

 private:
  template <bool kA, bool kB>
  __device__ __forceinline__ void copy_of(const Ring& ring) {
    if (left_ <= 0) return;  // of a block that has no tile, loaders have not begun
    copy<kA, kB>(ring);
    advance(ring);
    find_tile<kB>();
  }

  __device__ static bool is_first_warp() { return threadIdx.x < kWarp; }

  __device__ __forceinline__ void begin_tile() {
    const Tile tile = line_.wait(next_);
    line_.advance(next_);
    left_ = tile.k_blocks;
    if (left_ == kNoTile) return;
    load_a_.begin(tile);
    load_b_.begin(tile);
  }

  Line& line_;
  LinePosition next_;  // the tile's place that is asked for next
  RingPosition at_;
  typename Gemm::LoadA load_a_;
  typename Gemm::LoadB load_b_;
  int32_t left_;  // k blocks of the tile; none, or fewer, where there is no tile
};

}  // namespace tilemoe::cuda::sm80
