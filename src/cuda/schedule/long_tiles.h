// The reference tiles of long experts, shared out.
#pragma once

#include <cstdint>

#include "cuda/core/warp.h"
#include "cuda/schedule/expert_ranks.h"

namespace tilemoe::cuda {

__device__ __forceinline__ int32_t sum_blocks(int32_t rows) {
  return (rows + kSumRows - 1) / kSumRows;
}

// Their shares, with the experts that they are of.
class LongTiles {
 public:
  struct Params {
    const RankedExpert* ranked;       // (E)
    const LongExperts* long_experts;  // (1)
    int32_t tiles;                    // reference tiles of an expert
    int32_t most_shares;
  };

  __device__ explicit LongTiles(const Params& params) : params_(params) {
    const LongExperts all = *params.long_experts;
    experts_ = all.count;
    shares_ = Shares::of(all.k_blocks * params.tiles, params.most_shares);
  }

  __device__ int32_t experts() const { return experts_; }
  __device__ const Shares& shares() const { return shares_; }

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
    constexpr uint32_t kAllLanes = 0xffffffff;
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
  Shares shares_;
};

}  // namespace tilemoe::cuda
