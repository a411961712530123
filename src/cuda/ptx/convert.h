// Conversions of 8-bit floating-point numbers.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Two e4m3 numbers, the first in the low byte, as two float16: exact. NaN stays NaN. Needs compute
// capability 8.9.
__device__ __forceinline__ uint32_t e4m3_to_float16(uint16_t pair) {
  uint32_t halves;
  asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"(pair));
  return halves;
}

}  // namespace tilemoe::cuda::ptx
