// The numbers that decide an order of choice, with the same bits on host and device: exp, sigmoid,
// comparison keys, the order of a sum over experts, and the rules of scoring.
//
// What keeps the bits equal: a product feeds a sum only through an explicit fmaf, so contraction
// has nothing to change (it is switched off all the same); +, *, / and fmaf round once, correctly,
// everywhere; no function of the standard library is called. Subnormal numbers are kept.
#pragma once

#include <cmath>
#include <cstdint>

#include "core/numbers.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::order {

constexpr int32_t kNaNKey = INT32_MIN;

// Greater key, earlier choice. NaN comes last, -0 and +0 are equal.
TILEMOE_HOST_DEVICE int32_t key(float x) {
  const int32_t magnitude = bits_of(x) & INT32_MAX;
  const int32_t number = bits_of(x) < 0 ? -magnitude : magnitude;
  return magnitude > kInfinityBits ? kNaNKey : number;
}

// The number that has this key; a NaN for the key of NaNs.
TILEMOE_HOST_DEVICE float from_key(int32_t key) {
  if (key == kNaNKey) return from_bits(kInfinityBits + 1);
  return key < 0 ? -from_bits(-key) : from_bits(key);
}

// (key, index) in one number: the smaller one is chosen first, equal keys by lower index.
TILEMOE_HOST_DEVICE uint64_t rank(int32_t key, int32_t index) {
  const uint32_t descending = static_cast<uint32_t>(INT32_MAX) - static_cast<uint32_t>(key);
  return static_cast<uint64_t>(descending) << 32 | static_cast<uint32_t>(index);
}
TILEMOE_HOST_DEVICE int32_t rank_index(uint64_t rank) {
  return static_cast<int32_t>(static_cast<uint32_t>(rank));
}
TILEMOE_HOST_DEVICE int32_t rank_key(uint64_t rank) {
  return static_cast<int32_t>(static_cast<uint32_t>(INT32_MAX) - static_cast<uint32_t>(rank >> 32));
}

// 2^n for n in [-126, 127].
TILEMOE_HOST_DEVICE float power_of_two(int32_t n) {
  return from_bits((n + 127) << 23);
}

// e^x within 1.01 ulp (0.75 of the smallest number where the result is subnormal), never
// decreasing: measured on every 7th float. Exactly 1 at 0; NaN at NaN.
//
// x = n ln 2 + r with |r| <= ln(2)/2, e^r = 1 + r + r^2 q(r). q is the minimax polynomial of degree
// 4 for the relative error of e^r, 3.1e-9. ln 2 is cut in two so that n * kLn2High is exact.
TILEMOE_HOST_DEVICE float exp(float x) {
  constexpr float kToInteger = 12582912.f;  // 1.5 * 2^23: the sum's last bit counts ones
  constexpr float kLn2High = 0x1.62e4p-1f, kLn2Low = 0x1.7f7d1cp-20f;
  constexpr float kLowest = -104.f, kHighest = 89.f;  // beyond: exactly 0 and infinity

  const float bounded = x < kLowest ? kLowest : x > kHighest ? kHighest : x;
  const float shifted = fmaf(bounded, 0x1.715476p0f, kToInteger);
  const float n = shifted - kToInteger;
  const float r = fmaf(n, -kLn2Low, fmaf(n, -kLn2High, bounded));
  float q = 0x1.6a23d0p-10f;
  q = fmaf(q, r, 0x1.123a20p-7f);
  q = fmaf(q, r, 0x1.5558f2p-5f);
  q = fmaf(q, r, 0x1.555492p-3f);
  q = fmaf(q, r, 0x1.fffffcp-2f);
  const float mantissa = 1.f + fmaf(r * r, q, r);
  // Two factors, since 2^n alone may be no normal number. A NaN's exponent is arbitrary.
  const int32_t exponent = bits_of(shifted) - bits_of(kToInteger);
  const int32_t safe = exponent < -151 ? -151 : exponent > 129 ? 129 : exponent;
  const int32_t half = safe / 2;
  return mantissa * power_of_two(half) * power_of_two(safe - half);
}

// 1 / (1 + e^-x), through e^-|x| so that neither tail loses digits: within 2.4 ulp, never
// decreasing.
TILEMOE_HOST_DEVICE float sigmoid(float x) {
  const float z = exp(x < 0 ? x : -x);
  return (x < 0 ? z : 1.f) / (1.f + z);
}

// e^(x - max), and 1 where x is max even if that is infinite: the limit of logits that grow
// together. So a softmax is NaN only where a logit is.
TILEMOE_HOST_DEVICE float softmax_weight(float x, float max) {
  return exp(x == max ? 0.f : x - max);
}

// A sum over experts, or over a token's K: lane l adds those whose index mod 32 is l in ascending
// order, then lanes are added in halves. It is what a warp does with one shuffle a halving.
constexpr int kSumLanes = 32;

TILEMOE_HOST_DEVICE float add_lanes(float (&lanes)[kSumLanes]) {
  for (int half = kSumLanes / 2; half > 0; half /= 2)
    for (int l = 0; l < half; ++l) lanes[l] += lanes[l + half];
  return lanes[0];
}

}  // namespace tilemoe::order

namespace tilemoe {

// ---- rules of scoring

// Whether experts are ranked by sigmoid plus selection bias, else by the logit itself.
TILEMOE_HOST_DEVICE bool ranks_by_sigmoid(tilemoe_scoring scoring) {
  return scoring == TILEMOE_SIGMOID || scoring == TILEMOE_SIGMOID_RENORMALIZED;
}

// A share of a sum. If all are 0, the `present` ones get equal parts, as in softmax.
template <class Count>
TILEMOE_HOST_DEVICE float share_of(float value, float sum, Count present) {
  return sum > 0 ? value / sum : 1.f / static_cast<float>(present);
}

}  // namespace tilemoe
