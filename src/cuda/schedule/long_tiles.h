// The tiles of long experts, shared out among clusters.
#pragma once

#include <cstdint>

#include "cuda/core/warp.h"
#include "cuda/schedule/expert_ranks.h"

namespace tilemoe::cuda {

__device__ __forceinline__ int32_t sum_blocks(int32_t rows) {
  return (rows + kSumRows - 1) / kSumRows;
}

// The tiles of long experts by rank, number and k block, as one line of k blocks that is cut into
// equal shares, one a cluster. A tile that a share's border cuts has a partial sum on either side;
// so a share has two at most, one at each end.
class LongTiles {
 public:
  struct Params {
    const RankedExpert* ranked;       // (E)
    const LongExperts* long_experts;  // (1)
    int32_t tiles;                    // of an expert
    int32_t shares_at_most;
  };

  __device__ explicit LongTiles(const Params& params) : params_(params) {
    const LongExperts all = *params.long_experts;
    experts_ = all.count;
    end_ = all.k_blocks * params.tiles;
    shares_ = min(params.shares_at_most, end_ / kLeastShare);
  }

  __device__ int32_t experts() const { return experts_; }
  __device__ int32_t shares() const { return shares_; }
  // First k block of a share; of one past the last, the end.
  __device__ int32_t begin(int32_t share) const {
    if (share >= shares_) return end_;
    return share * (end_ / shares_) + min(share, end_ % shares_);
  }

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

  // Where the partial sum at one end of a share has its place, counted over all shares.
  __device__ static int32_t partial_sum(int32_t share, bool at_its_end) {
    return 2 * share + (at_its_end ? 1 : 0);
  }

 private:
  const Params& params_;
  int32_t experts_, end_, shares_;
};

}  // namespace tilemoe::cuda
