// Numbers with the same bits on host and device: bit casts, bfloat16 and float16.
#pragma once

#include <cstdint>
#include <cstring>

// Always inlined: on the host the caller decides which instructions a function may use, so the same
// text is compiled for any CPU and for CPUs with fused multiply-add.
#if defined(__CUDACC__)
#define TILEMOE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define TILEMOE_HOST_DEVICE inline __attribute__((always_inline))
#endif

namespace tilemoe::order {

// The bits of a float.

TILEMOE_HOST_DEVICE int32_t bits_of(float x) {
  int32_t bits;
  memcpy(&bits, &x, sizeof bits);
  return bits;
}

TILEMOE_HOST_DEVICE float from_bits(int32_t bits) {
  float x;
  memcpy(&x, &bits, sizeof x);
  return x;
}

constexpr int32_t kInfinityBits = 0x7f800000;

}  // namespace tilemoe::order

namespace tilemoe {

// The 16-bit floating-point formats, exact and the same on host and device.

struct BFloat16 {
  uint16_t bits;
};
struct Float16 {
  uint16_t bits;
};

TILEMOE_HOST_DEVICE float to_float(float x) {
  return x;
}

TILEMOE_HOST_DEVICE float to_float(BFloat16 x) {
  return order::from_bits(static_cast<int32_t>(static_cast<uint32_t>(x.bits) << 16));
}

// The 5-bit exponent is moved into place and rebased by an exact product, which also makes
// subnormal numbers normal; infinity and NaN get the exponent of all ones.
TILEMOE_HOST_DEVICE float to_float(Float16 x) {
  const int32_t moved = (x.bits & 0x7fff) << 13;
  const int32_t rebased = order::bits_of(order::from_bits(moved) * 0x1p112f);
  const int32_t magnitude = moved >= 0x7c00 << 13 ? moved | order::kInfinityBits : rebased;
  return order::from_bits(magnitude | static_cast<int32_t>((x.bits & 0x8000u) << 16));
}

TILEMOE_HOST_DEVICE void store(float x, float& out) {
  out = x;
}

// Rounds to nearest, ties to even. A NaN stays a NaN.
TILEMOE_HOST_DEVICE void store(float x, BFloat16& out) {
  const auto bits = static_cast<uint32_t>(order::bits_of(x));
  const uint32_t rounded = bits + 0x7fffu + (bits >> 16 & 1u);
  out.bits = static_cast<uint16_t>(x != x ? (bits >> 16 | 0x40u) : rounded >> 16);
}

TILEMOE_HOST_DEVICE void store(float x, Float16& out) {
  const auto bits = static_cast<uint32_t>(order::bits_of(x));
  const uint32_t magnitude = bits & 0x7fffffffu;
  uint32_t half;
  if (magnitude > 0x7f800000u) {
    half = 0x7e00u;
  } else if (magnitude >= 0x477ff000u) {  // from 65520 on, half-way to the next power of two
    half = 0x7c00u;
  } else if (magnitude < 0x38800000u) {  // subnormal: the sum with 0.5 rounds to units of 2^-24
    const float sum = order::from_bits(static_cast<int32_t>(magnitude)) + 0.5f;
    half = static_cast<uint32_t>(order::bits_of(sum)) - 0x3f000000u;
  } else {  // rebase the exponent from 127 to 15 and round away 13 bits
    half = (magnitude - 0x38000000u + 0xfffu + (magnitude >> 13 & 1u)) >> 13;
  }
  out.bits = static_cast<uint16_t>(half | (bits >> 16 & 0x8000u));
}

}  // namespace tilemoe
