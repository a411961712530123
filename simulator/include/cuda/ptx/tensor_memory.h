// Simulated: tensor memory (src/cuda/ptx/tensor_memory.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

template <uint32_t kColumns, int kBlocks>
__device__ __forceinline__ void tensor_memory_allocate(uint32_t shared) {
  simulator::allocate_tensor_columns(kBlocks, shared, kColumns);
}
template <int kBlocks>
__device__ __forceinline__ void tensor_memory_relinquish() {
  simulator::relinquish_tensor_columns(kBlocks);
}
template <uint32_t kColumns, int kBlocks>
__device__ __forceinline__ void tensor_memory_free(uint32_t address) {
  simulator::free_tensor_columns(kBlocks, address, kColumns);
}
__device__ __forceinline__ void tensor_memory_load_16x32(float* d, uint32_t address) {
  simulator::load_tensor_columns(d, 4, address);
}
__device__ __forceinline__ void tensor_memory_wait_loads() {
  simulator::wait_tensor_loads();
}

}  // namespace tilemoe::cuda::ptx
