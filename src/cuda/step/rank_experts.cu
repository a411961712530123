// Ranks experts by their rows for the weight gradients, and says which of them are long.
#include "check.h"
#include "cuda/early_launch.h"
#include "cuda/schedule/long_tiles.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;

struct RankParams {
  const int32_t* offsets;  // (E + 1)
  int32_t E;
  int32_t tiles;              // of an expert
  int32_t shares_at_most;     // 0: no expert is long
  RankedExpert* ranked;       // out (E)
  LongExperts* long_experts;  // out (1)
};

// An expert's tile is long beside all tiles' work spread over the shares.
__device__ bool is_long(const RankParams& params, int32_t rows) {
  const int64_t M = params.offsets[params.E];
  return rows > kFewRows && rows * kOfAnAverage * params.shares_at_most > M * params.tiles;
}

// A thread counts the experts that come before its own: those with more rows and, of as many, those
// with a smaller number.
__global__ void __launch_bounds__(kThreads) rank_rows(const RankParams params) {
  __shared__ int32_t rows_of[kThreads];
  __shared__ LongExperts all_long;
  wait_for_previous();
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t expert = static_cast<int32_t>(blockIdx.x) * kThreads + thread;
  const int32_t begin = expert < params.E ? params.offsets[expert] : 0;
  const int32_t end = expert < params.E ? params.offsets[expert + 1] : 0;
  const int32_t mine = end - begin;
  if (thread == 0) all_long = {};

  int32_t rank = 0, blocks_before = 0;
  LongExperts of_thread = {};
  for (int32_t first = 0; first < params.E; first += kThreads) {
    const int32_t other = first + thread;
    const int32_t rows =
        other < params.E ? params.offsets[other + 1] - params.offsets[other] : -1;  // -1: no expert
    if (is_long(params, rows)) ++of_thread.count, of_thread.k_blocks += sum_blocks(rows);
    __syncthreads();
    rows_of[thread] = rows;
    __syncthreads();
    for (int32_t i = 0; i < kThreads; ++i) {
      const bool comes_before = rows_of[i] > mine || (rows_of[i] == mine && first + i < expert);
      if (comes_before) ++rank, blocks_before += sum_blocks(rows_of[i]);
    }
  }
  if (expert < params.E) params.ranked[rank] = {expert, begin, end, blocks_before};
  if (blockIdx.x != 0) return;
  atomicAdd(&all_long.count, of_thread.count);
  atomicAdd(&all_long.k_blocks, of_thread.k_blocks);
  __syncthreads();
  if (thread == 0) *params.long_experts = all_long;
}

}  // namespace

void rank_experts(const Rows& rows, const ExpertRanks& to, int64_t tiles, int32_t shares_at_most,
                  void* stream) {
  const int64_t blocks = (rows.E + kThreads - 1) / kThreads;
  launch_early(rank_rows, static_cast<unsigned>(blocks), kThreads, 0,
               static_cast<cudaStream_t>(stream),
               RankParams{.offsets = rows.offsets,
                          .E = static_cast<int32_t>(rows.E),
                          .tiles = static_cast<int32_t>(tiles),
                          .shares_at_most = shares_at_most,
                          .ranked = to.ranked,
                          .long_experts = to.long_experts});
}

}  // namespace tilemoe::cuda
