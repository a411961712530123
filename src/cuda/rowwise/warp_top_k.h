// A token's top-K by one warp: its experts and their scores, from a row that fits the warp's
// registers. Top-K and the routing of few tokens have this one text.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/rowwise/packed_choice.h"
#include "cuda/rowwise/top_k_params.h"
#include "cuda/rowwise/warp_choice.h"
#include "routing/scoring.h"

namespace tilemoe::cuda {

template <int kSlots>
__device__ __forceinline__ void rank_by_sigmoid(const TopKParams& params, WarpRow<kSlots>& row) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int32_t e = s * kWarp + lane_index();
    if (e < params.E) row.x[s] = biased_sigmoid(params, row.x[s], e);
  }
}

// Lane k's score. `best` is what it chose; sum_over_all(max) is asked for by that rule alone.
template <class SumOverAll>
__device__ __forceinline__ float score_by_warp(const TopKParams& params, const FloatArray& logits,
                                               const Chosen& best, bool nan,
                                               const SumOverAll& sum_over_all) {
  const bool chosen = lane_index() < params.K;
  float score = 0.f;
  if (ranks_by_sigmoid(params.scoring)) {
    if (chosen) score = order::sigmoid(logits.at(best.id));
    if (params.scoring == TILEMOE_SIGMOID_RENORMALIZED)
      score = share_of(score, sum_of_lanes(score), params.K);
  } else {
    const float max = __shfl_sync(kAllLanes, best.value, 0);
    if (chosen) score = order::softmax_weight(best.value, max);
    score /= params.scoring == TILEMOE_SOFTMAX_OVER_ALL ? sum_over_all(max) : sum_of_lanes(score);
  }
  return nan ? order::from_key(order::kNaNKey) : score * params.factor;
}

__device__ __forceinline__ void store_by_warp(const TopKParams& params, int64_t t, int32_t id,
                                              float score) {
  const int64_t pair = t * params.K + lane_index();
  params.ids.set(pair, id);
  params.scores[pair] = score;
}

// What is done to a row before its choice, where nothing limits it.
struct NoGroups {
  template <int kSlots>
  __device__ __forceinline__ void limit(WarpRow<kSlots>&) const {}
};

// Lane k < K gets the k-th best of a token's logits (E) and its score.
template <int kSlots, class Groups>
__device__ __forceinline__ void choose_by_warp(const TopKParams& params, const Groups& groups,
                                               const FloatArray& logits, int32_t& id,
                                               float& score) {
  WarpRow<kSlots> row;
  row.load(logits, params.E);
  const bool nan = row.any_nan();
  const bool by_sigmoid = ranks_by_sigmoid(params.scoring);
  if (by_sigmoid) rank_by_sigmoid(params, row);
  groups.limit(row);
  // With 16 slots a choice of either kind would take half more registers.
  const bool packs = kSlots <= 8 && !by_sigmoid && logits.dtype != TILEMOE_FLOAT32;
  const Chosen best = packs ? PackedChoice<kSlots>(row, params.E).choose(params.K)
                            : WarpChoice<kSlots>(row, params.E).choose(params.K);
  id = best.id;
  score = score_by_warp(params, logits, best, nan, [&](float max) {
    if (!std::is_same_v<Groups, NoGroups>) row.load(logits, params.E);
    return row.softmax_sum(params.E, max);
  });
}

}  // namespace tilemoe::cuda
