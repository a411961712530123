// Formats of quantised weights (tilemoe_quantized): the sizes of their blocks, and the numbers that
// codes and scales stand for, the same on host and device.
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Values that share a scale. FP8: rows and columns of a tile; MXFP4, NVFP4: of a row; NF4: of all.
inline constexpr int64_t kFp8Tile = 128;
inline constexpr int64_t kMxfp4Block = 32;
inline constexpr int64_t kNvfp4Block = 16;
inline constexpr int64_t kNf4Block = 64;
// NF4_DOUBLE: scales that share a scale.
inline constexpr int64_t kNf4NestedBlock = 256;

// The numbers of 4-bit codes. Those of NF4 are bitsandbytes'.
inline constexpr int kCodes4 = 16;
inline constexpr float kE2m1[kCodes4] = {0.0f,  0.5f,  1.0f,  1.5f,  2.0f,  3.0f,  4.0f,  6.0f,
                                         -0.0f, -0.5f, -1.0f, -1.5f, -2.0f, -3.0f, -4.0f, -6.0f};
inline constexpr float kNf4[kCodes4] = {-1.0f,
                                        -0.6961928009986877f,
                                        -0.5250730514526367f,
                                        -0.39491748809814453f,
                                        -0.28444138169288635f,
                                        -0.18477343022823334f,
                                        -0.09105003625154495f,
                                        0.0f,
                                        0.07958029955625534f,
                                        0.16093020141124725f,
                                        0.24611230194568634f,
                                        0.33791524171829224f,
                                        0.44070982933044434f,
                                        0.5626170039176941f,
                                        0.7229568362236023f,
                                        1.0f};

constexpr bool is_nf4(tilemoe_format format) {
  return format == TILEMOE_FORMAT_NF4 || format == TILEMOE_FORMAT_NF4_DOUBLE;
}
// The numbers of a format of 4 bits.
constexpr const float* numbers_of(tilemoe_format format) {
  return is_nf4(format) ? kNf4 : kE2m1;
}

// s eeee mmm, exponent bias 7, no infinity. The exponent is moved into place and rebased by an
// exact product, which also makes subnormal numbers normal.
TILEMOE_HOST_DEVICE float e4m3_to_float(uint8_t code) {
  const uint32_t magnitude = code & 0x7fu, sign = (code & 0x80u) << 24;
  if (magnitude == 0x7fu) return order::from_bits(static_cast<int32_t>(sign | 0x7fc00000u));
  const float moved = order::from_bits(static_cast<int32_t>(sign | magnitude << 20));
  return moved * 0x1p120f;
}

// 2^(scale - 127); 255 is NaN.
TILEMOE_HOST_DEVICE float e8m0_to_float(uint8_t scale) {
  if (scale == 0xffu) return order::from_bits(0x7fc00000);
  const uint32_t bits = scale == 0 ? 0x00400000u : uint32_t{scale} << 23;
  return order::from_bits(static_cast<int32_t>(bits));
}

}  // namespace tilemoe
