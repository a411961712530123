// Tile order of the projections: each expert's rows are cut into blocks of BLOCK_M, and every block
// meets every block of columns. Counts are read from the device, so the host never waits for them.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/check.h"
#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda {

// Blocks of columns that share rows while they are in L2.
constexpr int32_t kColumnGroup = 8;
inline int32_t column_group(const Tuning& tuning) {
  return tuning.column_group != 0 ? tuning.column_group : kColumnGroup;
}

// A persistent CTA takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... of the order in which
//   experts ascend, so that CTAs read the weights of one expert at about the same time;
//   within an expert, groups of `n_group` blocks of columns ascend; within a group, row blocks; and
//   within a row block, the group's columns: the whole group uses rows gathered once while they are
//   in L2, and the next row block uses the group's slice of the weights.
// A cluster of two takes two row blocks of the same columns at a time, so that both need the same
// weights; of an expert's last, odd row block it takes two blocks of columns, so that none is idle.
// With kSameColumns it never does: the second CTA then has only rows past the expert's last.
// Every warp that needs tiles walks the order itself, 32 experts at a time.
template <int BLOCK_M, int kCluster = 1, bool kSameColumns = false>
class RowTiles {
 public:
  static constexpr int kTogether = kCluster;  // the grid has a multiple of this number of CTAs

  struct Params {
    const int32_t* begins;  // (E)
    const int32_t* ends;    // (E)
    int32_t E;
    int32_t n_blocks;
    int32_t n_group;
    int32_t k_blocks;
  };

  static Params params(const Rows& rows, int64_t n_blocks, int64_t k_blocks, int32_t n_group) {
    return {.begins = rows.offsets,
            .ends = rows.ends != nullptr ? rows.ends : rows.offsets + 1,
            .E = static_cast<int32_t>(rows.E),
            .n_blocks = static_cast<int32_t>(n_blocks),
            .n_group = std::min(n_group, static_cast<int32_t>(n_blocks)),
            .k_blocks = static_cast<int32_t>(k_blocks)};
  }
  // The maximum number of tiles, which the host knows.
  static int64_t max_tiles(const Rows& rows, int64_t n_blocks) {
    const int64_t m_blocks = rows.capacity / BLOCK_M + std::min<int64_t>(rows.E, rows.capacity);
    TILEMOE_ASSERT(m_blocks <= INT32_MAX / (2 * n_blocks),  // cuda_backend.cpp
                   "the GEMM of " << rows.capacity << " rows of " << rows.E
                                  << " experts has too many tiles to count");
    return m_blocks * n_blocks;
  }

  __device__ explicit RowTiles(const Params& params)
      : params_(params), next_(blockIdx.x / kCluster) {
    load_chunk();
  }

  // All lanes of a warp call it. False at the end.
  __device__ bool next(Tile& tile) {
    __syncwarp();  // (orders no memory: it only converges the lanes, as shuffles would)
    const int32_t index = next_;
    next_ += static_cast<int32_t>(gridDim.x) / kCluster;
    for (int32_t tiles; index >= before_ + (tiles = __shfl_sync(kAllLanes, tiles_through_, 31));) {
      before_ += tiles;
      chunk_ += kWarp;
      if (chunk_ >= params_.E) return false;
      load_chunk();
    }
    const int32_t in_chunk = index - before_;
    const int32_t owner = __ffs(__ballot_sync(kAllLanes, tiles_through_ > in_chunk)) - 1;
    const int32_t begin = __shfl_sync(kAllLanes, begin_, owner);
    const int32_t end = __shfl_sync(kAllLanes, end_, owner);
    const int32_t through = __shfl_sync(kAllLanes, tiles_through_, owner);
    const int32_t in_expert = in_chunk - (through - cluster_tiles(end - begin));
    // Row blocks, a cluster's at a time.
    const int32_t together = (blocks(end - begin) + kFilledUp) / kCluster;
    const auto rank = static_cast<int32_t>(blockIdx.x % kCluster);

    tile = {.expert = chunk_ + owner, .row_end = end, .k_blocks = params_.k_blocks};
    if (kCluster > 1 && !kSameColumns && in_expert >= together * params_.n_blocks) {
      tile.n_block = (in_expert - together * params_.n_blocks) * kCluster + rank;
      tile.row_begin =
          tile.n_block < params_.n_blocks ? begin + together * kCluster * BLOCK_M : end;
      return true;
    }
    const int32_t group = in_expert / (together * params_.n_group);
    const int32_t first_n = group * params_.n_group;
    const int32_t in_group = in_expert - first_n * together;
    const int32_t width = min(params_.n_group, params_.n_blocks - first_n);
    const int32_t m = in_group / width;
    tile.row_begin = begin + (m * kCluster + rank) * BLOCK_M;
    tile.n_block = first_n + in_group - m * width;
    tile.multicast_b = kCluster > 1;
    return true;
  }

 private:
  // To whole clusters of row blocks.
  static constexpr int32_t kFilledUp = kSameColumns ? kCluster - 1 : 0;

  __device__ static int32_t blocks(int32_t rows) { return (rows + BLOCK_M - 1) / BLOCK_M; }

  // Tiles of an expert; what a cluster takes at a time counts as one.
  __device__ int32_t cluster_tiles(int32_t rows) const {
    const int32_t m_blocks = blocks(rows) + kFilledUp;
    if constexpr (kSameColumns) return m_blocks / kCluster * params_.n_blocks;
    const int32_t odd = (params_.n_blocks + kCluster - 1) / kCluster;
    return m_blocks / kCluster * params_.n_blocks + m_blocks % kCluster * odd;
  }

  // This lane's expert of the chunk, and how many tiles the chunk has up to and with it.
  __device__ void load_chunk() {
    const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
    const int32_t expert = chunk_ + lane;
    begin_ = end_ = 0;
    if (expert < params_.E) {
      begin_ = params_.begins[expert];
      end_ = params_.ends[expert];
    }
    tiles_through_ = cluster_tiles(end_ - begin_);
#pragma unroll
    for (int32_t distance = 1; distance < kWarp; distance *= 2) {
      const int32_t below = __shfl_up_sync(kAllLanes, tiles_through_, distance);
      if (lane >= distance) tiles_through_ += below;
    }
  }

  const Params& params_;
  int32_t next_;        // index in the order of this block's, or its cluster's, next tile
  int32_t chunk_ = 0;   // first expert of the chunk
  int32_t before_ = 0;  // tiles before the chunk
  int32_t begin_, end_, tiles_through_;
};

}  // namespace tilemoe::cuda
