// Top-K: each token's best experts and their scores. A task is a block of tokens; counting the
// choices is one pass over the ids afterwards, since there is no scratch to count apart.
#include "cpu/choose.h"
#include "cpu/cpu_backend.h"
#include "cpu/matrix.h"
#include "cpu/native_fma.h"
#include "cpu/routing_scratch.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

template <class Logit, class Id>
void choose_all(const tilemoe_top_k_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1], K = args.K;
  const ChoiceRule rule{.scoring = args.scoring,
                        .E = E,
                        .K = K,
                        .bias = static_cast<const float*>(args.selection_bias.data),
                        .groups = {args.n_group, args.topk_group, args.group_score},
                        .factor = args.routed_scaling_factor};
  auto* ids = static_cast<Id*>(args.ids.data);
  auto* scores = static_cast<float*>(args.scores.data);
  const Blocks blocks = token_blocks(T, E);
  parallel_for(blocks.count, [&](int64_t block, int) {
    with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
      for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t)
        choose_and_score(rule, row_of<const Logit>(args.logits, t), scores + t * K, ids + t * K);
    });
  });
}

// Scores at ids (K) that were chosen elsewhere, with choose_and_score's bits for its ids.
template <class Logit, class Id>
TILEMOE_HOST_DEVICE void score_given(const ChoiceRule& rule, const Logit* row, const Id* ids,
                                     float* scores) {
  const int64_t E = rule.E, K = rule.K;
  const float none = order::from_key(-order::kInfinityBits);
  const auto is_present = [&](int64_t k) { return ids[k] >= 0 && ids[k] < E; };
  float max_of_row = none, max = none;
  bool any_nan = false;
  int64_t present = 0;
  for (int64_t e = 0; e < E; ++e) {
    const float x = to_float(row[e]);
    any_nan |= order::key(x) == order::kNaNKey;
    max_of_row = x > max_of_row ? x : max_of_row;
  }
  for (int64_t k = 0; k < K; ++k) {
    scores[k] = is_present(k) ? to_float(row[ids[k]]) : 0;
    if (!is_present(k)) continue;
    ++present;
    max = scores[k] > max ? scores[k] : max;
  }
  if (rule.scoring == TILEMOE_SOFTMAX_OVER_ALL) max = max_of_row;

  const bool sigmoid = ranks_by_sigmoid(rule.scoring);
  for (int64_t k = 0; k < K; ++k) {
    const float weight =
        sigmoid ? order::sigmoid(scores[k]) : order::softmax_weight(scores[k], max);
    scores[k] = is_present(k) ? weight : 0;
  }
  if (rule.scoring != TILEMOE_SIGMOID) {
    const float sum =
        rule.scoring == TILEMOE_SOFTMAX_OVER_ALL ? softmax_sum(row, E, max) : sum_chosen(scores, K);
    share(scores, K, sum, present);
  }
  for (int64_t k = 0; k < K; ++k)
    scores[k] = !is_present(k) ? 0
                : any_nan      ? order::from_key(order::kNaNKey)
                               : scores[k] * rule.factor;
}

template <class Logit, class Id>
void score_all(const tilemoe_top_k_scores_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1], K = args.ids.shape[1];
  const ChoiceRule rule{
      .scoring = args.scoring, .E = E, .K = K, .factor = args.routed_scaling_factor};
  const auto* ids = static_cast<const Id*>(args.ids.data);
  auto* scores = static_cast<float*>(args.scores.data);
  const Blocks blocks = token_blocks(T, E);
  parallel_for(blocks.count, [&](int64_t block, int) {
    with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
      for (int64_t t = blocks.begin(block); t < blocks.end(block); ++t)
        score_given(rule, row_of<const Logit>(args.logits, t), ids + t * K, scores + t * K);
    });
  });
}

// ids (T, K) -> expert_counts (E). Ids outside [0, E) are not counted.
template <class Id>
void count_choices(const tilemoe_tensor& given, const tilemoe_tensor& expert_counts) {
  const int64_t E = expert_counts.shape[0], pairs = given.shape[0] * given.shape[1];
  auto* counts = static_cast<int32_t*>(expert_counts.data);
  const auto* ids = static_cast<const Id*>(given.data);
  std::fill_n(counts, E, 0);
  for (int64_t pair = 0; pair < pairs; ++pair)
    if (ids[pair] >= 0 && ids[pair] < E) ++counts[ids[pair]];
}

}  // namespace

void top_k(const tilemoe_top_k_args& args) {
  with_integer(args.ids.dtype, [&]<class Id>() {
    with_float(args.logits.dtype, [&]<class Logit>() { choose_all<Logit, Id>(args); });
    if (present(args.expert_counts)) count_choices<Id>(args.ids, args.expert_counts);
  });
}

void top_k_scores(const tilemoe_top_k_scores_args& args) {
  with_integer(args.ids.dtype, [&]<class Id>() {
    with_float(args.logits.dtype, [&]<class Logit>() { score_all<Logit, Id>(args); });
    if (present(args.expert_counts)) count_choices<Id>(args.ids, args.expert_counts);
  });
}

}  // namespace tilemoe::cpu
