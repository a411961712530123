// Simulated: copies between global memory, shared memory and registers (src/cuda/ptx/copy.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, uint32_t bytes) {
  simulator::copy_async(shared, source, bytes);
}
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* source, uint32_t bytes) {
  simulator::copy_async_4(shared, source, bytes);
}
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  simulator::arrive_copies(barrier);
}

// 16, 8 or 4 bytes at a time.

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 v;
  simulator::load_shared(shared, &v, 16);
  return v;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t v;
  simulator::load_shared(shared, &v, 4);
  return v;
}
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

// Prefetches do nothing: the simulator has no caches.

__device__ __forceinline__ void prefetch_to_l2(const void*) {}

// ldmatrix: four 8x8 blocks from shared memory to a warp's registers.

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  simulator::load_matrices(r, shared, false);
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  simulator::load_matrices(r, shared, true);
}

// stmatrix: four 8x8 blocks from a warp's registers to shared memory.

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  simulator::store_matrices(shared, {r0, r1, r2, r3}, false);
}
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t shared, uint32_t r0, uint32_t r1,
                                                       uint32_t r2, uint32_t r3) {
  simulator::store_matrices(shared, {r0, r1, r2, r3}, true);
}

// movmatrix: the transpose of an 8x8 block in a warp's registers.

__device__ __forceinline__ uint32_t movmatrix(uint32_t word) {
  return simulator::move_matrix(word);
}

}  // namespace tilemoe::cuda::ptx
