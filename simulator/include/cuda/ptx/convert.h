// Simulated: conversions of 8-bit floating-point numbers, and the maximum that they are scaled by
// (src/cuda/ptx/convert.h).
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <algorithm>
#include <cstdint>

#include "core/fp8.h"

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ uint32_t e4m3_to_float16(uint16_t pair) {
  const auto convert = [](uint32_t code) -> uint32_t {
    const uint32_t sign = (code & 0x80u) << 8, exponent = code >> 3 & 0xfu, mantissa = code & 7u;
    if (exponent == 15 && mantissa == 7) return 0x7fffu;
    if (exponent > 0) return sign | (exponent + 8) << 10 | mantissa << 7;
    // Below 2^-6 a number is a whole number of 2^-9, which float16 has normalised.
    if (mantissa == 0) return sign;
    const uint32_t leading = mantissa >= 4 ? 2 : mantissa >= 2 ? 1 : 0;
    return sign | (leading + 6) << 10 | (mantissa << (10 - leading) & 0x3ffu);
  };
  return convert(pair & 0xffu) | convert(pair >> 8) << 16;
}

__device__ __forceinline__ uint16_t float_to_e4m3(float low, float high) {
  return static_cast<uint16_t>(to_e4m3(low) | to_e4m3(high) << 8);
}

// Magnitudes are in the order of their bits; past those of infinity they are NaN.
__device__ __forceinline__ uint32_t max_magnitude(uint32_t largest, uint32_t words,
                                                  uint32_t infinity) {
  const auto of_one = [&](uint32_t number, uint32_t word) {
    return word > infinity ? number : number > infinity ? word : std::max(number, word);
  };
  return of_one(largest & 0x7fffu, words & 0x7fffu) |
         of_one(largest >> 16 & 0x7fffu, words >> 16 & 0x7fffu) << 16 |
         ((largest ^ words) & 0x80008000u);
}
__device__ __forceinline__ uint32_t max_magnitude(uint32_t largest, uint32_t words, __nv_bfloat16) {
  return max_magnitude(largest, words, 0x7f80u);
}
__device__ __forceinline__ uint32_t max_magnitude(uint32_t largest, uint32_t words, __half) {
  return max_magnitude(largest, words, 0x7c00u);
}

}  // namespace tilemoe::cuda::ptx
