// Routing at small T from the tokens themselves: the order of a logit's sum and the places of
// pairs, the same text on host and device.
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "routing/order.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::decode {

constexpr int kMaxTokens = TILEMOE_ROUTE_TOKENS_MOST_T;
constexpr int kMaxExperts = TILEMOE_ROUTE_TOKENS_MOST_E;
constexpr int kMaxChosen = TILEMOE_ROUTE_TOKENS_MOST_K;

// A logit is a sum of parts of 512 columns each. Within a part lane l of 32 has columns 8 l to 8 l
// + 7 and 256 + 8 l to 256 + 8 l + 7, which it adds in ascending order by fma; then lanes are added
// in halves (order::add_lanes). Parts are added in ascending order, then the bias. Columns past d
// are skipped. A warp has a part in registers: two loads of 16 bytes a lane for 16-bit numbers.
constexpr int kLaneColumns = 8;
constexpr int kStretchColumns = order::kSumLanes * kLaneColumns;
constexpr int kStretches = 2;  // of a part
constexpr int kPartColumns = kStretches * kStretchColumns;

TILEMOE_HOST_DEVICE int32_t parts_of(int64_t d) {
  return static_cast<int32_t>((d + kPartColumns - 1) / kPartColumns);
}
// The first of a lane's eight columns in a stretch of a part.
TILEMOE_HOST_DEVICE int64_t first_column(int64_t part, int stretch, int lane) {
  return part * kPartColumns + stretch * kStretchColumns + lane * kLaneColumns;
}

// Adds the eight columns of a stretch to a lane's sum.
TILEMOE_HOST_DEVICE float add_columns(const float (&x)[kLaneColumns],
                                      const float (&weight)[kLaneColumns], float sum) {
  for (int i = 0; i < kLaneColumns; ++i) sum = fmaf(x[i], weight[i], sum);
  return sum;
}

// The tokens that chose an expert, each at most once. Pairs are in the order of tokens, so the
// place of a token among an expert's rows is the number of members before it.
class TokenSet {
 public:
  static constexpr int kWords = kMaxTokens / 32;

  TILEMOE_HOST_DEVICE static int word_of(int32_t token) { return token / 32; }
  TILEMOE_HOST_DEVICE static uint32_t bit_of(int32_t token) { return 1u << token % 32; }

  // word(w): its words.
  template <class Word>
  TILEMOE_HOST_DEVICE static int32_t count(const Word& word) {
    int32_t members = 0;
    for (int w = 0; w < kWords; ++w) members += ones(word(w));
    return members;
  }
  template <class Word>
  TILEMOE_HOST_DEVICE static int32_t count_before(int32_t token, const Word& word) {
    int32_t members = ones(word(word_of(token)) & (bit_of(token) - 1));
    for (int w = 0; w < word_of(token); ++w) members += ones(word(w));
    return members;
  }

 private:
  TILEMOE_HOST_DEVICE static int32_t ones(uint32_t word) {
#if defined(__CUDA_ARCH__)
    return __popc(word);
#else
    return __builtin_popcount(word);
#endif
  }
};
static_assert(kMaxTokens % 32 == 0);

}  // namespace tilemoe::decode
