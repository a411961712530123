// The transpose of an 8x8 block of 16-bit numbers in a warp's registers: lane l has columns
// 2 (l % 4) and the next of row l / 4, before and after.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ uint32_t movmatrix(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace tilemoe::cuda::ptx
