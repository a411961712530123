// Simulated: 16 or 8 bytes at a time (src/cuda/ptx/vector_copy.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
  uint2 v;
  simulator::load_shared(shared, &v, 8);
  return v;
}
__device__ __forceinline__ void store_shared_8(uint32_t shared, uint2 v) {
  simulator::store_shared(shared, &v, 8);
}
__device__ __forceinline__ uint4 load_global_once_16(const void* global) {
  uint4 v;
  simulator::load_global(global, &v, 16);
  return v;
}
__device__ __forceinline__ uint4 load_global_16(const void* global) {
  uint4 v;
  simulator::load_global(global, &v, 16);
  return v;
}
__device__ __forceinline__ uint2 load_global_8(const void* global) {
  uint2 v;
  simulator::load_global(global, &v, 8);
  return v;
}

}  // namespace tilemoe::cuda::ptx
