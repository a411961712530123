// Token rounding upwards: the tokens that did not choose an expert but weigh it most.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/choose.h"
#include "cpu/routing_scratch.h"

namespace tilemoe::cpu {

// The `needed` first of the ranks offered, in tokens' order. When the buffer is full all but the
// first `needed` go, and from then on only what beats their last comes in: no column is sorted.
class FirstRanks {
 public:
  FirstRanks() = default;
  FirstRanks(uint64_t* buffer, int64_t size, int64_t needed)
      : buffer_(buffer),
        size_(size),
        needed_(needed),
        lowest_key_(needed > 0 ? INT32_MIN : kNone) {}

  // A key below this cannot be among the first.
  TILEMOE_HOST_DEVICE int32_t lowest_key() const { return lowest_key_; }

  void offer(int32_t key, int32_t token) {
    buffer_[count_++] = order::rank(key, token);
    if (count_ == size_ && count_ > needed_) sift();
  }

  // Their number is `needed` if that many were offered. In ascending order of token.
  int64_t finish() {
    if (count_ > needed_) sift();
    std::sort(buffer_, buffer_ + count_,
              [](uint64_t a, uint64_t b) { return order::rank_index(a) < order::rank_index(b); });
    return count_;
  }

 private:
  static constexpr int32_t kNone = INT32_MAX;  // no number has this key

  // Tokens come in ascending order, so one that equals the last kept loses to it.
  void sift() {
    std::nth_element(buffer_, buffer_ + needed_ - 1, buffer_ + count_);
    count_ = needed_;
    lowest_key_ = order::rank_key(buffer_[needed_ - 1]) + 1;
  }

  uint64_t* buffer_ = nullptr;
  int64_t size_ = 0, needed_ = 0, count_ = 0;
  int32_t lowest_key_ = kNone;
};

// Columns that one task reads together.
constexpr int kColumns = 8;

// Offers p(t, e) of tokens [begin, end) that did not choose e, for experts [e0, e0 + count).
template <class Logit>
TILEMOE_HOST_DEVICE void offer_columns(const tilemoe_tensor& logits, const TokenSoftmax* softmax,
                                       int64_t begin, int64_t end, int64_t e0, int count,
                                       FirstRanks (&first)[kColumns]) {
  for (int64_t t = begin; t < end; ++t) {
    const Logit* row = row_of<const Logit>(logits, t) + e0;
    const TokenSoftmax token = softmax[t];
    float x[kColumns] = {};
    int32_t keys[kColumns], offered[kColumns];
    if (count == kColumns)
      for (int c = 0; c < kColumns; ++c) x[c] = to_float(row[c]);
    else
      for (int c = 0; c < count; ++c) x[c] = to_float(row[c]);
    const auto first_id = static_cast<int32_t>(e0);
    int32_t any = 0;
    for (int c = 0; c < kColumns; ++c) {
      const int32_t logit_key = order::key(x[c]);
      const int32_t ties = (logit_key == token.last_key) & (first_id + c <= token.last_id);
      const int32_t chosen = (logit_key > token.last_key) | ties;
      keys[c] = order::key(order::softmax_weight(x[c], token.max) / token.sum);
      offered[c] = (keys[c] >= first[c].lowest_key()) & (chosen ^ 1);
      any |= offered[c];
    }
    if (any == 0) continue;
    for (int c = 0; c < count; ++c)
      if (offered[c]) first[c].offer(keys[c], static_cast<int32_t>(t));
  }
}

}  // namespace tilemoe::cpu
