// One token's choice: its K best experts and their scores. Shared by top-K, token rounding and the
// router's backward, so that all three see the same pairs and the same bits.
#pragma once

#include <cstdint>

#include "cpu/choose_experts.h"
#include "cpu/choose_groups.h"
#include "routing/scoring.h"

namespace tilemoe::cpu {

struct ChoiceRule {
  tilemoe_scoring scoring;
  int64_t E, K;
  const float* bias = nullptr;  // (E), added to the sigmoids that experts are ranked by
  GroupLimit groups = {};
  float factor = 1;  // of every score
};

// The K shares of their sum.
TILEMOE_HOST_DEVICE void share(float* scores, int64_t K, float sum, int64_t present) {
  for (int64_t k = 0; k < K; ++k) scores[k] = share_of(scores[k], sum, present);
}

// `scores` (K), on entry the logits of the K, of which `max` is the greatest, or, over all, the
// greatest of the row.
template <class Logit>
TILEMOE_HOST_DEVICE void softmax_scores(tilemoe_scoring scoring, const Logit* row, int64_t E,
                                        int64_t K, float max, float* scores) {
  for (int64_t k = 0; k < K; ++k) scores[k] = order::softmax_weight(scores[k], max);
  const bool over_all = scoring == TILEMOE_SOFTMAX_OVER_ALL;
  const float sum = over_all ? softmax_sum(row, E, max) : sum_chosen(scores, K);
  for (int64_t k = 0; k < K; ++k) scores[k] /= sum;
}

// The same for the sigmoid scorings.
TILEMOE_HOST_DEVICE void sigmoid_scores(tilemoe_scoring scoring, int64_t K, float* scores) {
  for (int64_t k = 0; k < K; ++k) scores[k] = order::sigmoid(scores[k]);
  if (scoring == TILEMOE_SIGMOID_RENORMALIZED) share(scores, K, sum_chosen(scores, K), K);
}

// What comes last: the factor, or NaN.
TILEMOE_HOST_DEVICE void finish_scores(float factor, bool any_nan, int64_t K, float* scores) {
  for (int64_t k = 0; k < K; ++k)
    scores[k] = any_nan ? order::from_key(order::kNaNKey) : scores[k] * factor;
}

// The K best of a row and their scores. A token with a NaN logit gets NaN scores; returns whether
// it is one.
template <class Logit, class Id>
TILEMOE_HOST_DEVICE bool choose_and_score(const ChoiceRule& rule, const Logit* row, float* scores,
                                          Id* ids) {
  const int64_t E = rule.E, K = rule.K;
  bool any_nan;
  if (ranks_by_sigmoid(rule.scoring)) {
    any_nan = choose_in_groups(row, E, K, RankBySigmoid{rule.bias}, rule.groups, scores, ids);
    for (int64_t k = 0; k < K; ++k) scores[k] = to_float(row[ids[k]]);
    sigmoid_scores(rule.scoring, K, scores);
  } else {
    // The best group has the row's best expert, so scores[0] is the greatest of the row.
    any_nan = choose_in_groups(row, E, K, RankByLogit{}, rule.groups, scores, ids);
    softmax_scores(rule.scoring, row, E, K, scores[0], scores);
  }
  finish_scores(rule.factor, any_nan, K, scores);
  return any_nan;
}

}  // namespace tilemoe::cpu
