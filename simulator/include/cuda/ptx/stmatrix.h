// Simulated: four 8x8 blocks from a warp's registers to shared memory (src/cuda/ptx/stmatrix.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  simulator::store_matrices(shared, {r0, r1, r2, r3}, false);
}
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t shared, uint32_t r0, uint32_t r1,
                                                       uint32_t r2, uint32_t r3) {
  simulator::store_matrices(shared, {r0, r1, r2, r3}, true);
}

}  // namespace tilemoe::cuda::ptx
