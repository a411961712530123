// Simulated: a warp's MMA of 16 x 8 x 16 (src/cuda/ptx/mma_sync.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], __nv_bfloat16) {
  simulator::multiply_m16n8k16(d, a, b, true);
}
__device__ __forceinline__ void mma_m16n8k16(float (&d)[4], const uint32_t (&a)[4],
                                             const uint32_t (&b)[2], __half) {
  simulator::multiply_m16n8k16(d, a, b, false);
}

}  // namespace tilemoe::cuda::ptx
