// Simulated: four 8x8 blocks from shared memory to a warp's registers (src/cuda/ptx/ldmatrix.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  simulator::load_matrices(r, shared, false);
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  simulator::load_matrices(r, shared, true);
}

}  // namespace tilemoe::cuda::ptx
