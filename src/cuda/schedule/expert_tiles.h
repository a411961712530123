// Tile order of the weight gradients: every expert has a product of the same size, summed over as
// many rows as the expert has. Counts are read from the device, so the host never waits for them.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/schedule/long_tiles.h"

namespace tilemoe::cuda {

// A persistent block, or a cluster, first works off its share of the long experts' tiles; then it
// takes one of every `clusters` tiles of the order in which experts get shorter: there and back, so
// that who has the longer one of one round has the shorter one of the next.
// Within an expert, groups of `n_group` blocks of columns ascend; within a group, blocks of rows of
// the product; and within these, the group's columns. So the tiles under way at one time sum over
// the same rows, which come from L2 but for the first of them. A cluster of two takes two blocks of
// rows at a time, so that both need the same columns; of the last of an odd number of them it takes
// two blocks of columns.
template <int BLOCK_K, int kCluster = 1>
class ExpertTiles {
 public:
  static_assert(BLOCK_K == kSumRows, "ranks count k blocks of this size");
  static_assert(kCluster <= 2, "of an odd block of rows a cluster takes two of columns");

  struct Params {
    LongTiles::Params long_tiles;  // `tiles` are expert_tiles()
    int32_t E;
    int32_t m_blocks;  // of rows of the product
    int32_t n_blocks;
    int32_t n_group;
  };

  __device__ explicit ExpertTiles(const Params& params)
      : params_(params), long_tiles_(params.long_tiles) {
    next_ = long_tiles_.begin(cluster());
    share_end_ = long_tiles_.begin(cluster() + 1);
    if (next_ < share_end_) rank_ = long_tiles_.rank_at(next_);
  }

  __device__ bool next(Tile& tile) {
    return next_ < share_end_ ? next_of_share(tile) : next_of_short(tile);
  }

  // The expert's tile of that number, as block `rank_in_cluster` has it.
  __device__ static Tile tile_of(const Params& params, const RankedExpert& expert, int32_t number,
                                 int32_t rank_in_cluster) {
    const int32_t together = params.m_blocks / kCluster;  // blocks of rows, a cluster's at a time
    // An expert without rows has one k block, of zeros.
    Tile tile{.expert = expert.expert,
              .row_begin = expert.begin,
              .row_end = expert.end,
              .k_blocks = max(1, sum_blocks(expert.end - expert.begin))};
    if (kCluster > 1 && number >= together * params.n_blocks) {
      tile.n_block = (number - together * params.n_blocks) * kCluster + rank_in_cluster;
      // A block of columns too many has rows past the last, of which none is read or stored.
      tile.m_block = params.m_blocks - (tile.n_block < params.n_blocks ? 1 : 0);
      tile.n_block = min(tile.n_block, params.n_blocks - 1);
      return tile;
    }
    const int32_t group = number / (together * params.n_group);
    const int32_t first_n = group * params.n_group;
    const int32_t in_group = number - first_n * together;
    const int32_t width = min(params.n_group, params.n_blocks - first_n);
    const int32_t m_step = in_group / width;
    tile.n_block = first_n + in_group - m_step * width;
    tile.m_block = m_step * kCluster + rank_in_cluster;
    tile.shares_b = kCluster > 1;
    return tile;
  }

 private:
  __device__ static int32_t cluster() { return static_cast<int32_t>(blockIdx.x) / kCluster; }
  __device__ static int32_t rank_in_cluster() {
    return static_cast<int32_t>(blockIdx.x) % kCluster;
  }

  __device__ bool next_of_share(Tile& tile) {
    const LongTiles::Place place = long_tiles_.at(next_, rank_);
    tile = tile_of(params_, place.expert, place.tile, rank_in_cluster());
    const int32_t whole = tile.k_blocks;
    tile.k_blocks = min(whole - place.k_block, share_end_ - next_);
    tile.row_begin += place.k_block * BLOCK_K;
    tile.row_end = min(tile.row_end, tile.row_begin + tile.k_blocks * BLOCK_K);
    if (tile.k_blocks < whole)
      tile.partial_sum =
          LongTiles::partial_sum(cluster(), place.k_block == 0) * kCluster + rank_in_cluster();
    next_ += tile.k_blocks;
    const bool ends_expert =
        place.k_block + tile.k_blocks == whole && place.tile + 1 == params_.long_tiles.tiles;
    if (ends_expert) ++rank_;
    return true;
  }

  __device__ bool next_of_short(Tile& tile) {
    const auto clusters = static_cast<int32_t>(gridDim.x) / kCluster;
    const int32_t tiles = params_.long_tiles.tiles;
    const int32_t index =
        round_ * clusters + (round_ % 2 == 0 ? cluster() : clusters - 1 - cluster());
    const int32_t in_order = index / tiles;
    const int32_t rank = long_tiles_.experts() + in_order;
    if (rank >= params_.E) return false;
    ++round_;
    tile = tile_of(params_, params_.long_tiles.ranked[rank], index - in_order * tiles,
                   rank_in_cluster());
    return true;
  }

  const Params& params_;
  LongTiles long_tiles_;
  int32_t next_, share_end_;  // k blocks of this cluster's share that are still to be done
  int32_t rank_ = 0;          // of the expert that has the first of them
  int32_t round_ = 0;         // of the short experts' tiles
};

}  // namespace tilemoe::cuda
