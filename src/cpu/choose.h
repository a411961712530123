// One token's choice: its K best experts, with or without groups, and their scores.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/numbers.h"
#include "routing/groups.h"
#include "routing/order.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

// Logits are read in chunks of one sum lane each.
constexpr int kChunk = order::kSumLanes;

// x = logits [begin, begin + kChunk) of a row of E; past its end -inf, which weighs nothing.
template <class Logit>
TILEMOE_HOST_DEVICE int load_chunk(const Logit* row, int64_t begin, int64_t E, float (&x)[kChunk]) {
  const Logit* logits = row + begin;
  if (E - begin >= kChunk) {
    for (int l = 0; l < kChunk; ++l) x[l] = to_float(logits[l]);
    return kChunk;
  }
  const int count = static_cast<int>(E - begin);
  for (int l = 0; l < count; ++l) x[l] = to_float(logits[l]);
  for (int l = count; l < kChunk; ++l) x[l] = order::from_key(-order::kInfinityBits);
  return count;
}

// Sum over all E of softmax_weight(x, max).
template <class Logit>
TILEMOE_HOST_DEVICE float softmax_sum(const Logit* row, int64_t E, float max) {
  float lanes[kChunk] = {};
  for (int64_t begin = 0; begin < E; begin += kChunk) {
    float x[kChunk];
    const int count = load_chunk(row, begin, E, x);
    for (int l = 0; l < kChunk; ++l) x[l] = order::softmax_weight(x[l], max);
    for (int l = count; l < kChunk; ++l) x[l] = 0.f;  // where max is -inf the padding weighs 1
    for (int l = 0; l < kChunk; ++l) lanes[l] += x[l];
  }
  return order::add_lanes(lanes);
}

// Sum over a token's K.
TILEMOE_HOST_DEVICE float sum_chosen(const float* x, int64_t K) {
  float lanes[kChunk] = {};
  for (int64_t begin = 0; begin < K; begin += kChunk) {
    const int64_t count = std::min<int64_t>(kChunk, K - begin);
    for (int64_t l = 0; l < count; ++l) lanes[l] += x[begin + l];
  }
  return order::add_lanes(lanes);
}

// The K best seen so far as a heap in the caller's own output: the worst on top until sort().
template <class Id>
class BestK {
 public:
  BestK(float* values, Id* ids, int64_t K) : values_(values), ids_(ids), K_(K) {}

  TILEMOE_HOST_DEVICE int32_t worst_key() const { return order::key(values_[0]); }

  TILEMOE_HOST_DEVICE void fill(int64_t slot, float value, int64_t id) { put(slot, value, id); }
  void build() {
    for (int64_t slot = K_ / 2 - 1; slot >= 0; --slot) sink(slot, K_);
  }
  TILEMOE_HOST_DEVICE void replace_worst(float value, int64_t id) {
    put(0, value, id);
    sink(0, K_);
  }
  // Best first.
  void sort() {
    for (int64_t count = K_ - 1; count > 0; --count) {
      std::swap(values_[0], values_[count]);
      std::swap(ids_[0], ids_[count]);
      sink(0, count);
    }
  }

 private:
  TILEMOE_HOST_DEVICE void put(int64_t slot, float value, int64_t id) {
    values_[slot] = value;
    ids_[slot] = static_cast<Id>(id);
  }
  TILEMOE_HOST_DEVICE bool worse(int64_t a, int64_t b) const {
    const int32_t key_a = order::key(values_[a]), key_b = order::key(values_[b]);
    return key_a != key_b ? key_a < key_b : ids_[a] > ids_[b];
  }
  TILEMOE_HOST_DEVICE void sink(int64_t slot, int64_t count) {
    for (int64_t child; (child = 2 * slot + 1) < count; slot = child) {
      if (child + 1 < count && worse(child + 1, child)) ++child;
      if (!worse(child, slot)) return;
      std::swap(values_[slot], values_[child]);
      std::swap(ids_[slot], ids_[child]);
    }
  }

  float* values_;
  Id* ids_;
  int64_t K_;
};

// visit(l, group) for each expert begin + l of a chunk.
template <class Visit>
TILEMOE_HOST_DEVICE void each_group(int64_t begin, int count, int64_t size, const Visit& visit) {
  int64_t group = begin / size, left = size - begin % size;
  for (int l = 0; l < count; ++l) {
    visit(l, group);
    if (--left == 0) ++group, left = size;
  }
}

// The number that a choice ranks by: the logit itself, or its sigmoid plus a bias; outside the best
// groups of a token NaN, which ranks last. One type for all kinds: a branch per chunk is free, and
// a type per kind would compile choose() as many times.
struct Ranking {
  bool by_sigmoid;
  const float* bias = nullptr;  // (E) or null
  int64_t group_size = 0;       // 0 without groups
  uint32_t groups = 0;          // a bit for each of the best

  TILEMOE_HOST_DEVICE void apply(float (&x)[kChunk], int64_t begin, int count) const {
    if (by_sigmoid) {
      for (int l = 0; l < kChunk; ++l) x[l] = order::sigmoid(x[l]);
      if (bias != nullptr)
        for (int l = 0; l < count; ++l) x[l] += bias[begin + l];
    }
    if (group_size == 0) return;
    each_group(begin, count, group_size, [&](int l, int64_t group) {
      if ((groups >> group & 1) == 0) x[l] = order::from_key(order::kNaNKey);
    });
  }
};

// ids = the K best, best first; values = the numbers that ranked them. Returns whether a logit is
// NaN.
template <class Logit, class Id>
TILEMOE_HOST_DEVICE bool choose(const Logit* row, int64_t E, int64_t K, const Ranking& ranking,
                                float* values, Id* ids) {
  BestK<Id> best(values, ids, K);
  int64_t filled = 0;
  bool any_nan = false;
  for (int64_t begin = 0; begin < E; begin += kChunk) {
    float x[kChunk];
    int32_t keys[kChunk];
    const int count = load_chunk(row, begin, E, x);
    int32_t lowest = INT32_MAX, highest = INT32_MIN;
    for (int l = 0; l < kChunk; ++l) lowest = std::min(lowest, order::key(x[l]));
    any_nan |= lowest == order::kNaNKey;
    ranking.apply(x, begin, count);
    int l = 0;
    for (; l < count && filled < K; ++l) {
      best.fill(filled++, x[l], begin + l);
      if (filled == K) best.build();
    }
    if (l == count) continue;
    for (int i = 0; i < kChunk; ++i) keys[i] = order::key(x[i]);
    for (int i = 0; i < kChunk; ++i) highest = std::max(highest, keys[i]);
    if (highest <= best.worst_key()) continue;
    // Ids ascend, so of equal keys the one already there stays.
    for (; l < count; ++l)
      if (keys[l] > best.worst_key()) best.replace_worst(x[l], begin + l);
  }
  best.sort();
  return any_nan;
}

// ---- the choice among the experts of a token's best groups: the others rank last, as NaN does

struct GroupLimit {
  int64_t n_group = 1, topk_group = 1;
  tilemoe_group_score score = TILEMOE_GROUP_MAX;
};

// A bit for each of a row's best groups.
template <class Logit>
TILEMOE_HOST_DEVICE uint32_t best_groups(const Logit* row, int64_t E, const Ranking& ranking,
                                         const GroupLimit& limit) {
  order::TopTwo worth[kMaxGroups];
  for (int64_t begin = 0; begin < E; begin += kChunk) {
    float x[kChunk];
    const int count = load_chunk(row, begin, E, x);
    ranking.apply(x, begin, count);
    each_group(begin, count, E / limit.n_group,
               [&](int l, int64_t group) { worth[group].add(x[l]); });
  }
  int32_t keys[kMaxGroups];
  const auto groups = static_cast<int32_t>(limit.n_group);
  for (int32_t g = 0; g < groups; ++g) keys[g] = worth[g].key_of(limit.score);
  uint32_t best = 0;
  for (int32_t g = 0; g < groups; ++g) {
    int32_t before = 0;
    for (int32_t other = 0; other < groups; ++other)
      before += order::group_before(keys[other], other, keys[g], g) ? 1 : 0;
    if (before < limit.topk_group) best |= 1u << g;
  }
  return best;
}

// One token's choice: its K best experts and their scores. Shared by top-K, token rounding and the
// router's backward, so that all three see the same pairs and the same bits.

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

// The last step: the factor, or NaN.
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
  Ranking ranking{.by_sigmoid = ranks_by_sigmoid(rule.scoring), .bias = rule.bias};
  if (rule.groups.n_group > 1) {
    ranking.groups = best_groups(row, E, ranking, rule.groups);
    ranking.group_size = E / rule.groups.n_group;
  }
  const bool any_nan = choose(row, E, K, ranking, scores, ids);
  if (ranking.by_sigmoid) {
    for (int64_t k = 0; k < K; ++k) scores[k] = to_float(row[ids[k]]);
    sigmoid_scores(rule.scoring, K, scores);
  } else {
    // The best group has the row's best expert, so scores[0] is the greatest of the row.
    softmax_scores(rule.scoring, row, E, K, scores[0], scores);
  }
  finish_scores(rule.factor, any_nan, K, scores);
  return any_nan;
}

}  // namespace tilemoe::cpu
