// Tile order of the weight gradients: every expert has a product of the same size, summed over as
// many rows as the expert has. Counts are read from the device, so the host never waits for them.
#pragma once

#include <cstdint>

#include "cuda/gemm/tile.h"

namespace tilemoe::cuda {

// A persistent block, or a cluster, takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... of the
// order in which experts ascend; within an expert, groups of `n_group` blocks of columns; within a
// group, blocks of rows of the product; and within these, the group's columns. So the tiles under
// way at one time sum over the same rows, which come from L2 but for the first of them. A cluster
// of two takes two blocks of rows at a time, so that both need the same columns; the last of an odd
// number of them has a second one that is empty.
template <int BLOCK_K, int kCluster = 1>
class ExpertTiles {
 public:
  struct Params {
    const int32_t* offsets;  // (E + 1)
    int32_t E;
    int32_t m_steps;  // blocks of rows, a cluster's at a time
    int32_t n_blocks;
    int32_t n_group;
  };

  __device__ explicit ExpertTiles(const Params& params)
      : params_(params), next_(static_cast<int32_t>(blockIdx.x) / kCluster) {}

  __device__ bool next(Tile& tile) {
    const int32_t tiles = params_.m_steps * params_.n_blocks;
    const int32_t expert = next_ / tiles;
    if (expert >= params_.E) return false;
    const int32_t in_expert = next_ - expert * tiles;
    next_ += static_cast<int32_t>(gridDim.x) / kCluster;

    const int32_t group = in_expert / (params_.m_steps * params_.n_group);
    const int32_t first_n = group * params_.n_group;
    const int32_t in_group = in_expert - first_n * params_.m_steps;
    const int32_t width = min(params_.n_group, params_.n_blocks - first_n);
    const int32_t m_step = in_group / width;
    const int32_t begin = params_.offsets[expert], end = params_.offsets[expert + 1];
    // An expert without rows has one k block, of zeros.
    tile = {.expert = expert,
            .row_begin = begin,
            .row_end = end,
            .n_block = first_n + in_group - m_step * width,
            .k_blocks = max(1, (end - begin + BLOCK_K - 1) / BLOCK_K),
            .m_block = m_step * kCluster + static_cast<int32_t>(blockIdx.x % kCluster),
            .shares_b = kCluster > 1};
    return true;
  }

 private:
  const Params& params_;
  int32_t next_;  // index in the order of this block's, or its cluster's, next tile
};

}  // namespace tilemoe::cuda
