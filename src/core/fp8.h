// E4M3 numbers with one scale per block: the formulas of the fp8 recipe, the same on host and
// device. A value is code * scale.
//
// A block's scale is that of TransformerEngine's Float8BlockScaling (common/recipe/recipe_common.cuh
// at 01c24fe): the values are multiplied by factor = 448 / amax, by default rounded down to a power
// of two, and scale = 1 / factor.
//   zeros alone        factor 1
//   an infinity        factor 1: infinities become 448, the largest number
//   NaN                is no part of amax, and its code is NaN; a block of NaN alone has factor 1
//   448 / amax = inf   factor is the largest finite number of the values' dtype
#pragma once

#include <cstdint>

#include "core/formats.h"
#include "core/numbers.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

inline constexpr float kMaxE4m3 = 448.f;

// The largest finite number of a dtype.
TILEMOE_HOST_DEVICE float largest_of(tilemoe_dtype dtype) {
  switch (dtype) {
    case TILEMOE_BFLOAT16: return order::from_bits(0x7f7f0000);
    case TILEMOE_FLOAT16: return 65504.f;
    default: return order::from_bits(0x7f7fffff);
  }
}

// amax: the largest magnitude of a block without its NaNs.
TILEMOE_HOST_DEVICE float fp8_factor(float amax, float largest, bool power_of_two) {
  if (amax == 0.f || order::bits_of(amax) >= order::kInfinityBits) return 1.f;
  float factor = kMaxE4m3 / amax;
  if (order::bits_of(factor) == order::kInfinityBits) factor = largest;
  return power_of_two ? order::from_bits(order::bits_of(factor) & order::kInfinityBits) : factor;
}

// fp8_factor() by powers of two of numbers of 16 bits, and 1 / that factor, without divisions: a
// mantissa past 1.75 (448 = 1.75 * 2^8) makes the quotient's exponent smaller by one. The numbers of
// 16 bits next to 1.75 are too far from it for the quotient to be rounded up to a power of two.
TILEMOE_HOST_DEVICE float fp8_power_factor(float amax) {
  const int32_t bits = order::bits_of(amax);
  if (bits == 0 || bits >= order::kInfinityBits) return 1.f;
  const int32_t exponent = 262 - (bits + 0x1fffff) / 0x800000;
  return order::from_bits((exponent < 254 ? exponent : 254) * 0x800000);
}
TILEMOE_HOST_DEVICE float inverse_of_power(float factor) {
  const int32_t bits = 0x7f000000 - order::bits_of(factor);
  return order::from_bits(bits > 0 ? bits : 0x400000);  // 2^-127 is not normal
}

// Rounds to nearest, ties to even. What is past 448 becomes 448, NaN 0x7f.
TILEMOE_HOST_DEVICE uint8_t to_e4m3(float x) {
  const auto bits = static_cast<uint32_t>(order::bits_of(x));
  const uint32_t magnitude = bits & 0x7fffffffu;
  if (magnitude > 0x7f800000u) return 0x7f;
  uint32_t code;
  if (magnitude < 0x3c800000u) {  // below 2^-6, subnormal: the sum rounds to units of 2^-9
    const float sum = order::from_bits(static_cast<int32_t>(magnitude)) + 0x1p14f;
    code = static_cast<uint32_t>(order::bits_of(sum)) - 0x46800000u;
  } else {  // rebase the exponent from 127 to 7 and round away 20 bits
    code = (magnitude - 0x3c000000u + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20;
    if (code > 0x7eu) code = 0x7e;
  }
  return static_cast<uint8_t>(code | (bits >> 24 & 0x80u));
}

}  // namespace tilemoe
