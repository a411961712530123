// Top-K by a block a token: any E and K, and many experts in groups.
#pragma once

#include <algorithm>

#include "cuda/core/launch_kernel.h"
#include "cuda/ptx/dynamic_shared.h"
#include "cuda/rowwise/block_choice.h"
#include "cuda/rowwise/launch.h"
#include "cuda/rowwise/top_k_params.h"
#include "cuda/rowwise/warp_choice.h"
#include "routing/scoring.h"

namespace tilemoe::cuda {

// A block's K stand in shared memory up to here, where a multiprocessor still takes three blocks;
// past it they are sorted where they are written.
constexpr int64_t kMaxSharedK = 8192;

// sum over i of value(i) in the order of routing/order.h, in every thread of the block.
template <class Value>
__device__ float sum_by_first_warp(float& shared, int64_t count, const Value& value) {
  if (threadIdx.x < kWarp) {
    float lane = 0.f;
    for (int64_t i = threadIdx.x; i < count; i += kWarp) lane += value(i);
    lane = sum_of_lanes(lane);
    if (threadIdx.x == 0) shared = lane;
  }
  __syncthreads();
  return shared;
}

// values: on entry what each of the K was ranked by, on return its score.
template <int kThreads>
__device__ void score_by_block(const TopKParams& params, const FloatArray& logits,
                               const IntegerArray& ids, float* values) {
  __shared__ float shared_sum;
  const int32_t E = params.E, K = params.K;
  const auto chosen = [&](int64_t k) { return values[k]; };
  if (ranks_by_sigmoid(params.scoring)) {
    for (int64_t k = threadIdx.x; k < K; k += kThreads)
      values[k] = order::sigmoid(logits.at(ids.at(k)));
    if (params.scoring == TILEMOE_SIGMOID) return;
    __syncthreads();
    const float sum = sum_by_first_warp(shared_sum, K, chosen);
    for (int64_t k = threadIdx.x; k < K; k += kThreads) values[k] = share_of(values[k], sum, K);
    return;
  }
  const float max = values[0];
  __syncthreads();  // it is overwritten below
  for (int64_t k = threadIdx.x; k < K; k += kThreads)
    values[k] = order::softmax_weight(values[k], max);
  __syncthreads();
  const auto weight = [&](int64_t e) { return order::softmax_weight(logits.at(e), max); };
  const float sum = params.scoring == TILEMOE_SOFTMAX_OVER_ALL
                        ? sum_by_first_warp(shared_sum, E, weight)
                        : sum_by_first_warp(shared_sum, K, chosen);
  for (int64_t k = threadIdx.x; k < K; k += kThreads) values[k] /= sum;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 3) top_k_by_blocks(const TopKParams params) {
  using Choice = BlockChoice<kThreads>;
  using Groups = BlockGroups<kThreads>;
  __shared__ typename Choice::Shared shared;
  __shared__ typename Groups::Shared shared_groups;
  TILEMOE_DYNAMIC_SHARED(float, shared_values, alignof(float));  // (K), then the ids (K)
  const int32_t E = params.E, K = params.K;
  for (int64_t t = blockIdx.x; t < params.T; t += gridDim.x) {
    const FloatArray logits = params.logits.row(t);
    const IntegerArray ids_out = params.ids.from(t * K);
    float* const scores_out = params.scores + t * K;
    const bool in_shared = K <= kMaxSharedK;
    float* const values = in_shared ? shared_values : scores_out;
    const IntegerArray ids = in_shared ? IntegerArray{shared_values + K, false} : ids_out;

    bool nan = false;
    for (int64_t e = threadIdx.x; e < E; e += kThreads)
      nan |= order::key(logits.at(e)) == order::kNaNKey;
    nan = __syncthreads_or(nan);
    const auto choose = [&](const auto& value) {
      if (params.groups.n_group == 1) return Choice::choose(shared, value, E, K, values, ids);
      const uint32_t best = Groups::best_groups(shared_groups, params.groups, value);
      Choice::choose(
          shared,
          [&](int32_t e) {
            const bool in_best = best >> e / params.groups.size & 1;
            return in_best ? value(e) : order::from_key(order::kNaNKey);
          },
          E, K, values, ids);
    };
    if (ranks_by_sigmoid(params.scoring))
      choose([&](int32_t e) { return biased_sigmoid(params, logits.at(e), e); });
    else
      choose([&](int32_t e) { return logits.at(e); });
    score_by_block<kThreads>(params, logits, ids, values);
    for (int64_t k = threadIdx.x; k < K; k += kThreads) {  // each thread its own
      const auto id = static_cast<int32_t>(ids.at(k));
      if (in_shared) ids_out.set(k, id);
      scores_out[k] = nan ? order::from_key(order::kNaNKey) : values[k] * params.factor;
      if (params.counts != nullptr) atomicAdd(&params.counts[id], 1);
    }
    __syncthreads();  // the next token's choice overwrites this one's (past 2^31 tokens: else a
                      // block has one)
  }
}

template <int kThreads>
void launch_top_k_by_blocks(const TopKParams& params, cudaStream_t stream) {
  constexpr int kBytesEach = sizeof(float) + sizeof(int32_t);
  allow_shared_memory<top_k_by_blocks<kThreads>, kMaxSharedK * kBytesEach>();
  const int64_t bytes = params.K <= kMaxSharedK ? params.K * kBytesEach : 0;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(params.T, INT32_MAX));
  launch_kernel("top-K",
                {.blocks = blocks, .threads = kThreads, .stream = stream, .shared_bytes = bytes},
                top_k_by_blocks<kThreads>, params);
}

}  // namespace tilemoe::cuda
