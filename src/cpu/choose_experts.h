// One token's choice of its K best experts, and the sums over a row that scores are made of.
#pragma once

#include <algorithm>
#include <cstdint>

#include "routing/half.h"
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

// What a choice ranks by: the logit itself, or its sigmoid plus a bias.
struct RankByLogit {
  TILEMOE_HOST_DEVICE void apply(float (&)[kChunk], int64_t, int) const {}
};
struct RankBySigmoid {
  const float* bias;  // (E) or null
  TILEMOE_HOST_DEVICE void apply(float (&x)[kChunk], int64_t begin, int count) const {
    for (int l = 0; l < kChunk; ++l) x[l] = order::sigmoid(x[l]);
    if (bias == nullptr) return;
    for (int l = 0; l < count; ++l) x[l] += bias[begin + l];
  }
};

// ids = the K best, best first; values = what they were ranked by. Returns whether a logit is NaN.
template <class Logit, class Id, class RankBy>
TILEMOE_HOST_DEVICE bool choose(const Logit* row, int64_t E, int64_t K, const RankBy& rank_by,
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
    rank_by.apply(x, begin, count);
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

}  // namespace tilemoe::cpu
