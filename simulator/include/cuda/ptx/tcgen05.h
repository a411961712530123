// Simulated: MMAs into tensor memory, and tensor memory (src/cuda/ptx/tcgen05.h).
#pragma once

#include <cstdint>

#include "cuda/ptx/descriptors.h"

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void tcgen05_fence_before_sync() {
  simulator::fence_tcgen05(false);
}
__device__ __forceinline__ void tcgen05_fence_after_sync() {
  simulator::fence_tcgen05(true);
}
template <int kCtas>
__device__ __forceinline__ void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b,
                                                uint32_t instruction, uint32_t accumulate) {
  simulator::multiply_tcgen05(kCtas, d, a, b, instruction, accumulate != 0);
}
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  simulator::commit_tcgen05(1, barrier, 0);
}
__device__ __forceinline__ void tcgen05_commit_2cta(uint32_t barrier, uint16_t blocks) {
  simulator::commit_tcgen05(2, barrier, blocks);
}

// Tensor memory.

template <uint32_t kColumns, int kCtas>
__device__ __forceinline__ void tensor_memory_allocate(uint32_t shared) {
  simulator::allocate_tensor_columns(kCtas, shared, kColumns);
}
template <int kCtas>
__device__ __forceinline__ void tensor_memory_relinquish() {
  simulator::relinquish_tensor_columns(kCtas);
}
template <uint32_t kColumns, int kCtas>
__device__ __forceinline__ void tensor_memory_free(uint32_t address) {
  simulator::free_tensor_columns(kCtas, address, kColumns);
}
__device__ __forceinline__ void tensor_memory_load_16x32(float* d, uint32_t address) {
  simulator::load_tensor_columns(d, 4, address);
}
__device__ __forceinline__ void tensor_memory_wait_loads() {
  simulator::wait_tensor_loads();
}

}  // namespace tilemoe::cuda::ptx
