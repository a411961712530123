// Ranks experts by their rows for the weight gradients, and finds the long ones.
#include "core/check.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/schedule/expert_tiles.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kExperts = kThreads / kWarp;  // of a block

struct RankParams {
  const int32_t* offsets;  // (E + 1)
  int32_t E;
  int32_t tiles;              // of an expert
  int32_t max_splits;         // 0: no expert is long
  RankedExpert* ranked;       // out (E)
  LongExperts* long_experts;  // out (1)
};

__device__ int32_t sum_of_lanes(int32_t value) {
  return __reduce_add_sync(kAllLanes, value);
}

// A warp counts the experts that come before its own: those with more rows and, of as many, those
// with a smaller number.
__global__ void __launch_bounds__(kThreads) rank_rows(const RankParams params) {
  wait_for_previous();
  const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
  const auto expert = static_cast<int32_t>(blockIdx.x * kExperts + threadIdx.x / kWarp);
  if (expert >= params.E) return;
  const int32_t begin = params.offsets[expert], end = params.offsets[expert + 1];
  const int32_t mine = end - begin, M = params.offsets[params.E];

  int32_t rank = 0, blocks_before = 0;
  LongExperts all_long = {};
  for (int32_t other = lane; other < params.E; other += kWarp) {
    const int32_t rows = params.offsets[other + 1] - params.offsets[other];
    const bool comes_before = rows > mine || (rows == mine && other < expert);
    if (comes_before) ++rank, blocks_before += sum_blocks(rows);
    if (is_long(rows, M, params.tiles, params.max_splits))
      ++all_long.count, all_long.k_blocks += sum_blocks(rows);
  }
  rank = sum_of_lanes(rank);
  blocks_before = sum_of_lanes(blocks_before);
  all_long = {sum_of_lanes(all_long.count), sum_of_lanes(all_long.k_blocks)};
  if (lane != 0) return;
  params.ranked[rank] = {expert, begin, end, blocks_before};
  if (expert == 0) *params.long_experts = all_long;
}

}  // namespace

void rank_experts(const DeviceInfo& device, const Rows& rows, const ExpertRanks& to, int64_t tiles,
                  int32_t max_splits, void* stream) {
  const int64_t blocks = (rows.E + kExperts - 1) / kExperts;
  launch_pdl<rank_rows>({.device = device,
                         .blocks = static_cast<unsigned>(blocks),
                         .threads = kThreads,
                         .stream = static_cast<cudaStream_t>(stream)},
                        RankParams{.offsets = rows.offsets,
                                   .E = static_cast<int32_t>(rows.E),
                                   .tiles = static_cast<int32_t>(tiles),
                                   .max_splits = max_splits,
                                   .ranked = to.ranked,
                                   .long_experts = to.long_experts});
}

}  // namespace tilemoe::cuda
