// Four 8x8 blocks of 16-bit numbers from a warp's registers to shared memory. Lane 8 i + r gives
// the address of row r of block i; register i of lane 4 r + c holds columns 2 c and 2 c + 1 of that
// row.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
               "r"(r0), "r"(r1), "r"(r2), "r"(r3)
               : "memory");
}

// The blocks transposed: register i of lane 4 r + c holds rows 2 c and 2 c + 1 of column r.
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t shared, uint32_t r0, uint32_t r1,
                                                       uint32_t r2, uint32_t r3) {
  asm volatile(
      "stmatrix.sync.aligned.m8n8.x4.trans.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(shared),
      "r"(r0), "r"(r1), "r"(r2), "r"(r3)
      : "memory");
}

}  // namespace tilemoe::cuda::ptx
