// The tile order of the weight gradients, and the split-K of long experts.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/schedule/splits.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda {

__device__ __forceinline__ int32_t sum_blocks(int32_t rows) {
  return (rows + kSumRows - 1) / kSumRows;
}

// The splits of long experts, with their experts.
class LongTiles {
 public:
  struct Params {
    const RankedExpert* ranked;       // (E)
    const LongExperts* long_experts;  // (1)
    int32_t tiles;                    // reference tiles of an expert
    int32_t max_splits;
  };

  __device__ explicit LongTiles(const Params& params) : params_(params) {
    const LongExperts all = *params.long_experts;
    experts_ = all.count;
    splits_ = Splits::of(all.k_blocks * params.tiles, params.max_splits);
  }

  __device__ int32_t experts() const { return experts_; }
  __device__ const Splits& splits() const { return splits_; }

  // A k block of the line.
  struct Place {
    RankedExpert expert;
    int32_t tile;     // of the expert
    int32_t k_block;  // of the tile
  };
  __device__ Place at(int32_t k_block, int32_t rank) const {
    const RankedExpert expert = params_.ranked[rank];
    const int32_t in_expert = k_block - expert.blocks_before * params_.tiles;
    const int32_t k_blocks = sum_blocks(expert.end - expert.begin);
    const int32_t tile = in_expert / k_blocks;
    return {expert, tile, in_expert - tile * k_blocks};
  }
  // Rank of the expert that has a k block. All lanes of a warp call it.
  __device__ int32_t rank_at(int32_t k_block) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
    for (int32_t first = 0;; first += kWarp) {
      const int32_t rank = first + lane;
      const bool begins_before =
          rank < experts_ && params_.ranked[rank].blocks_before * params_.tiles <= k_block;
      const uint32_t lanes = __ballot_sync(kAllLanes, begins_before);
      if (lanes != kAllLanes) return first + __popc(lanes) - 1;
    }
  }

 private:
  const Params& params_;
  int32_t experts_;
  Splits splits_;
};

// Tile order of the weight gradients: every expert has a GEMM of the same size, summed over the
// rows of the expert. Counts are read from the device, so the host never waits for them.

struct ExpertTilesParams {
  LongTiles::Params long_tiles;
  int32_t E;
  ReferenceTiles reference;
};

// The second half that is still to be done, if a CTA does both.
template <int kCtas>
struct SecondHalf {};
template <>
struct SecondHalf<1> {
  bool is_left = false;
  Tile tile{};
};

// Two CTAs, a cluster, work on the halves of a reference tile, which mostly need the same columns
// of B. The cluster first takes its splits of the tiles of long experts, one of every `clusters`:
// the number of clusters does not affect where splits begin. Then it takes one of every `clusters`
// tiles of the experts in descending order of rows, alternately forwards and backwards, so that a
// cluster with the longer tile of one round has the shorter tile of the next.
//
// With kCtas = 1 a CTA takes the part of a cluster: a tile of twice the rows. If the halves of a
// long expert's reference tile have different columns, it takes one half after the other.
template <int BLOCK_K, int kCtas = 2>
class ExpertTiles : SecondHalf<kCtas> {
 public:
  static constexpr int kTogether = kCtas;  // the grid has a multiple of this number of CTAs
  static_assert(BLOCK_K == kSumRows, "ranks count k blocks of this size");

  using Params = ExpertTilesParams;

  __device__ explicit ExpertTiles(const Params& params)
      : params_(params), long_tiles_(params.long_tiles), split_(cluster() - clusters()) {}

  // All lanes of a warp call it. False at the end.
  __device__ bool next(Tile& tile) {
    if constexpr (kCtas == 1)
      if (takes_second_half(tile)) return true;
    if (next_ == split_end_ && split_ < long_tiles_.splits().count) begin_split();
    return next_ < split_end_ ? next_of_split(tile) : next_of_short(tile);
  }

  // Half of reference tile `number` of the expert.
  __device__ static Tile tile_of(const Params& params, const RankedExpert& expert, int32_t number,
                                 int32_t half) {
    const ReferenceTiles::Half place = params.reference.half(number, half);
    return tile_at(expert, place.m_block, place.n_block, place.same_columns);
  }

 private:
  __device__ static int32_t cluster() { return static_cast<int32_t>(blockIdx.x) / kCtas; }
  __device__ static int32_t clusters() { return static_cast<int32_t>(gridDim.x) / kCtas; }
  __device__ static int32_t half() { return static_cast<int32_t>(blockIdx.x) % kCtas; }

  __device__ static Tile tile_at(const RankedExpert& expert, int32_t m_block, int32_t n_block,
                                 bool multicast_b) {
    // An expert without rows has one k block, of zeros.
    return {.expert = expert.expert,
            .row_begin = expert.begin,
            .row_end = expert.end,
            .n_block = n_block,
            .k_blocks = max(1, sum_blocks(expert.end - expert.begin)),
            .m_block = m_block,
            .multicast_b = multicast_b};
  }

  __device__ bool takes_second_half(Tile& tile) {
    SecondHalf<kCtas>& second = *this;
    if (!second.is_left) return false;
    second.is_left = false;
    tile = second.tile;
    return true;
  }

  // Turns the first half of a reference tile into all of its rows, and then a second one of other
  // columns.
  __device__ void take_both_halves(Tile& tile) {
    SecondHalf<kCtas>& second = *this;
    tile.m_block /= 2;
    second.is_left = !tile.multicast_b && tile.n_block + 1 < params_.reference.n_blocks;
    tile.multicast_b = false;
    second.tile = tile;
    ++second.tile.n_block;
    if (second.tile.partial_sum >= 0) ++second.tile.partial_sum;
  }

  // The next one of the cluster, if it has one.
  __device__ void begin_split() {
    split_ += clusters();
    next_ = long_tiles_.splits().begin(split_);
    split_end_ = long_tiles_.splits().begin(split_ + 1);
    if (next_ < split_end_) rank_ = long_tiles_.rank_at(next_);
  }

  __device__ bool next_of_split(Tile& tile) {
    const LongTiles::Place place = long_tiles_.at(next_, rank_);
    tile = tile_of(params_, place.expert, place.tile, half());
    const int32_t whole = tile.k_blocks;
    tile.k_blocks = min(whole - place.k_block, split_end_ - next_);
    tile.row_begin += place.k_block * BLOCK_K;
    tile.row_end = min(tile.row_end, tile.row_begin + tile.k_blocks * BLOCK_K);
    if (tile.k_blocks < whole)
      tile.partial_sum = Splits::partial_sum(split_, place.k_block == 0) * 2 + half();
    next_ += tile.k_blocks;
    const bool ends_expert =
        place.k_block + tile.k_blocks == whole && place.tile + 1 == params_.long_tiles.tiles;
    if (ends_expert) ++rank_;
    if constexpr (kCtas == 1) take_both_halves(tile);
    return true;
  }

  __device__ bool next_of_short(Tile& tile) {
    const int32_t tiles = kCtas == 1 ? params_.reference.whole_blocks() : params_.long_tiles.tiles;
    const int32_t index =
        round_ * clusters() + (round_ % 2 == 0 ? cluster() : clusters() - 1 - cluster());
    const int32_t in_order = index / tiles, number = index - in_order * tiles;
    const int32_t rank = long_tiles_.experts() + in_order;
    if (rank >= params_.E) return false;
    ++round_;
    const RankedExpert expert = params_.long_tiles.ranked[rank];
    if constexpr (kCtas == 1) {
      const ReferenceTiles::Block place = params_.reference.whole_block(number);
      tile = tile_at(expert, place.m_block, place.n_block, false);
    } else {
      tile = tile_of(params_, expert, number, half());
    }
    return true;
  }

  const Params& params_;
  LongTiles long_tiles_;
  int32_t split_;                     // the current one; past the last, none
  int32_t next_ = 0, split_end_ = 0;  // its k blocks that are still to be done
  int32_t rank_ = 0;                  // of the expert that has the first of them
  int32_t round_ = 0;                 // of the short experts' tiles
};

}  // namespace tilemoe::cuda
