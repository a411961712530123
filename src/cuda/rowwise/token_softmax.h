// One token's softmax and choice as token rounding sees them, with the CPU's bits. By all lanes of
// a warp; translation units compile it without contraction.
#pragma once

#include <cstdint>

#include "cuda/rowwise/warp_choice.h"
#include "routing/half.h"
#include "routing/order.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

// The greatest number of a row (E); NaN where there is none.
template <class Logit>
__device__ __forceinline__ float largest_logit(const Logit* row, int64_t E) {
  int32_t best = INT32_MIN;
  for (int64_t e = lane_index(); e < E; e += kWarp) best = max(best, order::key(to_float(row[e])));
  return order::from_key(__reduce_max_sync(kAllLanes, best));
}

// Sum over all E of softmax_weight(x, max).
template <class Logit>
__device__ __forceinline__ float softmax_sum(const Logit* row, int64_t E, float max) {
  float sum = 0.f;
  for (int64_t e = lane_index(); e < E; e += kWarp)
    sum += order::softmax_weight(to_float(row[e]), max);
  return sum_of_lanes(sum);
}

struct TokenSoftmax {
  float max;
  float sum;                  // p(e) = weight / sum; NaN where a logit is
  float chosen_sum;           // s of a chosen expert = weight / chosen_sum; NaN where a logit is
  int32_t last_key, last_id;  // the last of the K

  // `chosen` (K): the token's choice, best first.
  template <class Logit>
  __device__ __forceinline__ static TokenSoftmax of(const Logit* row, int64_t E,
                                                    const int32_t* chosen, int64_t K) {
    TokenSoftmax token;
    token.max = to_float(row[chosen[0]]);
    token.sum = softmax_sum(row, E, token.max);  // a NaN weighs NaN
    float chosen_sum = 0.f;
    for (int64_t k = lane_index(); k < K; k += kWarp)
      chosen_sum += token.weight(to_float(row[chosen[k]]));
    chosen_sum = sum_of_lanes(chosen_sum);
    token.chosen_sum = token.sum == token.sum ? chosen_sum : token.sum;
    token.last_id = chosen[K - 1];
    token.last_key = order::key(to_float(row[token.last_id]));
    return token;
  }

  __device__ __forceinline__ float weight(float logit) const {
    return order::softmax_weight(logit, max);
  }
  __device__ __forceinline__ bool chose(int32_t expert, int32_t key) const {
    return key > last_key || (key == last_key && expert <= last_id);
  }
};

// The choice of token rounding as a top-K: ids and scores (T, K), counts (E) or null.
inline tilemoe_top_k_args choice_args(const tilemoe_tensor& logits, int64_t K, int32_t* ids,
                                      float* scores, int32_t* counts, void* stream) {
  const int64_t T = logits.shape[0];
  const auto matrix = [&](void* data, tilemoe_dtype dtype) -> tilemoe_tensor {
    return {.data = data, .dtype = dtype, .ndim = 2, .shape = {T, K}, .stride = {K, 1}};
  };
  tilemoe_top_k_args args{};
  args.struct_size = sizeof args;
  args.device = TILEMOE_CUDA;
  args.scoring = TILEMOE_SOFTMAX_RENORMALIZED;
  args.K = K;
  args.logits = logits;
  args.ids = matrix(ids, TILEMOE_INT32);
  args.scores = matrix(scores, TILEMOE_FLOAT32);
  if (counts != nullptr)
    args.expert_counts = {.data = counts,
                          .dtype = TILEMOE_INT32,
                          .ndim = 1,
                          .shape = {logits.shape[1]},
                          .stride = {1}};
  args.stream = stream;
  args.n_group = args.topk_group = 1;
  args.routed_scaling_factor = 1;
  return args;
}

}  // namespace tilemoe::cuda
