// Token rounding: its scratch in the caller's workspace, and the softmax and choice of a token.
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "cuda/kernels/warp_choice.h"
#include "routing/order.h"
#include "routing/rounding.h"
#include "routing/spec.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

constexpr int64_t kWordTokens = 32;  // tokens of a mask

// A token's weight for an expert, in an order without signs: greater is chosen first. 0 for no
// token, 1 for NaN; the top bit is set if the token chose the expert: the weight then is s, else p.
class WeightCode {
 public:
  static constexpr int kBits = 30;  // of the order: weights are at most 1
  static constexpr uint32_t kChosen = 1u << 31;
  static constexpr uint32_t kNone = 0;

  __device__ __forceinline__ static uint32_t of(float weight, bool chosen) {
    const int32_t key = order::key(weight);
    const uint32_t ordered = key == order::kNaNKey ? 1u : static_cast<uint32_t>(key) + 2;
    return chosen ? ordered | kChosen : ordered;
  }
  __device__ __forceinline__ static uint32_t ordered(uint32_t code) { return code & ~kChosen; }
  __device__ __forceinline__ static bool chosen(uint32_t code) { return (code & kChosen) != 0; }
  __device__ __forceinline__ static float weight(uint32_t code) {
    const uint32_t x = ordered(code);
    return order::from_key(x == 1 ? order::kNaNKey : static_cast<int32_t>(x - 2));
  }
};

// Which of 32 tokens an expert has rows for.
struct ExpertWord {
  uint32_t kept;        // those that chose it
  uint32_t added;       // those that did not
  int32_t rows_before;  // of the expert, for tokens before these
};

// The tokens of a word: all of one group, whose last word may have fewer.
struct WordTokens {
  uint32_t group;
  int64_t first;
  int count;
};

struct RoundScratch {
  RoundGroups groups;
  int64_t group_words;   // of 32 tokens, of a group
  int64_t words;         // of all groups
  int32_t* counts;       // (E, groups) f
  int32_t* totals;       // (E + 1) of several groups: an expert's rows; then the dropped pairs
  size_t zeroed_bytes;   // of counts and totals, which are added to
  int32_t* targets;      // (E, groups) f'
  int32_t* rows_before;  // (E, groups) of an expert, for groups before one; not that of the first
  int32_t* nan_tokens;   // (words) of each word
  int32_t* ids;          // (T, K) each token's choice
  float* scores;         // (T, K)
  uint32_t* codes;       // (E, words * 32)
  ExpertWord* masks;     // (words, E)

  RoundScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout)
      : groups(spec),
        group_words((groups.tokens + kWordTokens - 1) / kWordTokens),
        words(groups.count * group_words) {
    const int64_t each_target = checked_product(spec.E, groups.count, "E * groups");
    TILEMOE_CHECK_SUPPORTED(each_target <= INT32_MAX,
                            "token rounding of " << spec.E << " experts in " << groups.count
                                                 << " groups, expected at most " << INT32_MAX
                                                 << " of both together");
    const size_t first = layout.used();
    counts = layout.take<int32_t>(each_target);
    totals = layout.take<int32_t>(several_groups() ? spec.E + 1 : 0);
    zeroed_bytes = layout.used() - first;
    targets = layout.take<int32_t>(each_target);
    rows_before = layout.take<int32_t>(several_groups() ? each_target : 0);
    nan_tokens = layout.take<int32_t>(words);
    ids = layout.take<int32_t>(spec.T * spec.K);
    scores = layout.take<float>(spec.T * spec.K);
    codes = layout.take<uint32_t>(checked_product(spec.E, words * kWordTokens, "E * T"));
    masks = layout.take<ExpertWord>(checked_product(spec.E, words, "E * T"));
  }

  TILEMOE_HOST_DEVICE bool several_groups() const { return groups.count > 1; }
  TILEMOE_HOST_DEVICE int64_t code_stride() const { return words * kWordTokens; }
  // Where an expert's numbers of a group are.
  TILEMOE_HOST_DEVICE int64_t place(int64_t expert, int64_t group) const {
    return expert * groups.count + group;
  }
  // There are fewer than 2^31 words, of which a group has at least one.
  TILEMOE_HOST_DEVICE WordTokens tokens_of(int64_t word) const {
    const auto each = static_cast<uint32_t>(group_words);
    const uint32_t group = static_cast<uint32_t>(word) / each;
    const int64_t in_group = int64_t{static_cast<uint32_t>(word) % each} * kWordTokens;
    const int64_t left = groups.tokens - in_group;
    return {group, group * groups.tokens + in_group,
            static_cast<int>(left < kWordTokens ? left : kWordTokens)};
  }
};

struct RoundParams {
  tilemoe_routing routing;
  const int64_t* seed;
  const int64_t* step;
  int32_t* expert_counts;  // (E) or null
  RoundScratch scratch;
};

// Fills ids, counts, codes and nan_tokens from the logits (T, E).
void weigh_tokens(const DeviceInfo& device, const tilemoe_tensor& logits, int64_t K,
                  const RoundScratch& scratch, void* stream);

// From the counts: every target f', the routing's offsets and counters, expert_counts, and of
// several groups the rows that an expert has in those before.
void find_targets(const DeviceInfo& device, const RoundParams& params, void* stream);

// One token's softmax and choice as token rounding sees them, with the CPU's bits. By all lanes of
// a warp; translation units compile it without contraction.

// The greatest number of a row (E); NaN if it has none.
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
