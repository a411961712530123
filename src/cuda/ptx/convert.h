// Conversions of 8-bit floating-point numbers, and the maximum that they are scaled by.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Two e4m3 numbers, the first in the low byte, as two float16: exact. NaN stays NaN. Needs compute
// capability 8.9.
__device__ __forceinline__ uint32_t e4m3_to_float16(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

// Two numbers as e4m3, the first in the low byte: rounded to nearest even, those past 448 become
// 448, NaN becomes 0x7f. Needs compute capability 8.9.
__device__ __forceinline__ uint16_t float_to_e4m3(float low, float high) {
  uint16_t pair;
  asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
  return pair;
}

// Of two numbers at a time, the larger magnitude, with any sign. A NaN is ignored, unless both are.
__device__ __forceinline__ uint32_t max_magnitude(uint32_t largest, uint32_t words, __nv_bfloat16) {
  uint32_t of_both;
  asm("max.xorsign.abs.bf16x2 %0, %1, %2;" : "=r"(of_both) : "r"(largest), "r"(words));
  return of_both;
}
__device__ __forceinline__ uint32_t max_magnitude(uint32_t largest, uint32_t words, __half) {
  uint32_t of_both;
  asm("max.xorsign.abs.f16x2 %0, %1, %2;" : "=r"(of_both) : "r"(largest), "r"(words));
  return of_both;
}

}  // namespace tilemoe::cuda::ptx
