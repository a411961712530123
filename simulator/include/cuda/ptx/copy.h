// Simulated: 16-byte copies from global to shared memory (src/cuda/ptx/cp_async.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, uint32_t bytes) {
  simulator::copy_async(shared, source, bytes);
}
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  simulator::arrive_copies(barrier);
}

// Simulated: 16 or 8 bytes at a time (src/cuda/ptx/vector_copy.h).

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

// Simulated: there are no caches (src/cuda/ptx/prefetch.h).

__device__ __forceinline__ void prefetch_to_l2(const void*) {}

// Simulated: four 8x8 blocks from shared memory to a warp's registers (src/cuda/ptx/ldmatrix.h).

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  simulator::load_matrices(r, shared, false);
}
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  simulator::load_matrices(r, shared, true);
}

// Simulated: four 8x8 blocks from a warp's registers to shared memory (src/cuda/ptx/stmatrix.h).

__device__ __forceinline__ void stmatrix_x4(uint32_t shared, uint32_t r0, uint32_t r1, uint32_t r2,
                                            uint32_t r3) {
  simulator::store_matrices(shared, {r0, r1, r2, r3}, false);
}
__device__ __forceinline__ void stmatrix_x4_transposed(uint32_t shared, uint32_t r0, uint32_t r1,
                                                       uint32_t r2, uint32_t r3) {
  simulator::store_matrices(shared, {r0, r1, r2, r3}, true);
}

// Simulated: the transpose of an 8x8 block in a warp's registers (src/cuda/ptx/movmatrix.h).

__device__ __forceinline__ uint32_t movmatrix(uint32_t word) {
  return simulator::move_matrix(word);
}

}  // namespace tilemoe::cuda::ptx
