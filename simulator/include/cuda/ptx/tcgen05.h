// Simulated: matrix products into tensor memory (src/cuda/ptx/tcgen05.h).
#pragma once

#include <cstdint>

#include "cuda/ptx/tcgen05_descriptors.h"

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void tcgen05_fence_before_sync() {
  simulator::fence_tcgen05(false);
}
__device__ __forceinline__ void tcgen05_fence_after_sync() {
  simulator::fence_tcgen05(true);
}
template <int kBlocks>
__device__ __forceinline__ void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b,
                                                uint32_t instruction, uint32_t accumulate) {
  simulator::multiply_tcgen05(kBlocks, d, a, b, instruction, accumulate != 0);
}
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  simulator::commit_tcgen05(1, barrier, 0);
}
__device__ __forceinline__ void tcgen05_commit_pair(uint32_t barrier, uint16_t blocks) {
  simulator::commit_tcgen05(2, barrier, blocks);
}

}  // namespace tilemoe::cuda::ptx
