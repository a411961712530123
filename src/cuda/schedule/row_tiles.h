// Tile order of the projections: each expert's rows are cut into blocks of BLOCK_M, and every block
// meets every block of columns. Counts are read from the device, so the host never waits for them.
#pragma once

#include <cstdint>

#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"

namespace tilemoe::cuda {

// A persistent block takes tiles blockIdx.x, blockIdx.x + gridDim.x, ... of the order in which
//   experts ascend, so that one expert's weights are read by neighbours in time;
//   within an expert, groups of `n_group` blocks of columns ascend; within a group, row blocks; and
//   within a row block, the group's columns: rows gathered once are met by the whole group while
//   they are in L2, and so is the group's slice of the weights by the next row block.
// Every warp that needs tiles walks the order itself, 32 experts at a time.
template <int BLOCK_M>
class RowTiles {
 public:
  struct Params {
    const int32_t* offsets;  // (E + 1)
    int32_t E;
    int32_t n_blocks;
    int32_t n_group;
    int32_t k_blocks;
  };

  __device__ explicit RowTiles(const Params& params) : params_(params), next_(blockIdx.x) {
    load_chunk();
  }

  // All lanes of a warp call it. False at the end.
  __device__ bool next(Tile& tile) {
    __syncwarp();
    const int32_t index = next_;
    next_ += static_cast<int32_t>(gridDim.x);
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
    const int32_t m_blocks = blocks(end - begin);
    const int32_t through = __shfl_sync(kAllLanes, tiles_through_, owner);
    const int32_t in_expert = in_chunk - (through - m_blocks * params_.n_blocks);

    const int32_t group = in_expert / (m_blocks * params_.n_group);
    const int32_t first_n = group * params_.n_group;
    const int32_t in_group = in_expert - first_n * m_blocks;
    const int32_t width = min(params_.n_group, params_.n_blocks - first_n);
    const int32_t m_block = in_group / width;
    tile = {.expert = chunk_ + owner,
            .row_begin = begin + m_block * BLOCK_M,
            .row_end = end,
            .n_block = first_n + in_group - m_block * width,
            .k_blocks = params_.k_blocks};
    return true;
  }

 private:
  static constexpr uint32_t kAllLanes = 0xffffffff;

  __device__ static int32_t blocks(int32_t rows) { return (rows + BLOCK_M - 1) / BLOCK_M; }

  // This lane's expert of the chunk, and how many tiles the chunk has up to and with it.
  __device__ void load_chunk() {
    const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
    const int32_t expert = chunk_ + lane;
    begin_ = end_ = 0;
    if (expert < params_.E) {
      begin_ = params_.offsets[expert];
      end_ = params_.offsets[expert + 1];
    }
    tiles_through_ = blocks(end_ - begin_) * params_.n_blocks;
#pragma unroll
    for (int32_t distance = 1; distance < kWarp; distance *= 2) {
      const int32_t below = __shfl_up_sync(kAllLanes, tiles_through_, distance);
      if (lane >= distance) tiles_through_ += below;
    }
  }

  const Params& params_;
  int32_t next_;        // index in the order of this block's next tile
  int32_t chunk_ = 0;   // first expert of the chunk
  int32_t before_ = 0;  // tiles before the chunk
  int32_t begin_, end_, tiles_through_;
};

}  // namespace tilemoe::cuda
