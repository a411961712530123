// Copies: cp.async, loads and stores of 16, 8 and 4 bytes, prefetch, ldmatrix, stmatrix, movmatrix.
//
// cp.async: 16-byte copies from global to shared memory, one per thread.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Copies the first `bytes` (0 or 16) and fills the rest with zeros; `source` is not read where
// `bytes` is 0. Bypasses L1.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
               "r"(bytes)
               : "memory");
}

// 4 bytes, kept in L1: neighbouring k blocks read the same sector.
__device__ __forceinline__ void cp_async_4(uint32_t shared, const void* source, uint32_t bytes) {
  asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(source), "r"(bytes)
               : "memory");
}

// One of the barrier's expected arrivals, made when all copies that this thread has started so far
// have landed.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

// 16, 8 or 4 bytes at a time.

__device__ __forceinline__ uint4 load_shared_16(uint32_t shared) {
  uint4 v;
  asm volatile("ld.shared.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "r"(shared)
               : "memory");
  return v;
}
__device__ __forceinline__ uint32_t load_shared_4(uint32_t shared) {
  uint32_t v;
  asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(shared) : "memory");
  return v;
}
__device__ __forceinline__ uint2 load_shared_8(uint32_t shared) {
  uint2 v;
  asm volatile("ld.shared.v2.u32 {%0, %1}, [%2];" : "=r"(v.x), "=r"(v.y) : "r"(shared) : "memory");
  return v;
}
__device__ __forceinline__ void store_shared_8(uint32_t shared, uint2 v) {
  asm volatile("st.shared.v2.u32 [%0], {%1, %2};" ::"r"(shared), "r"(v.x), "r"(v.y) : "memory");
}

// Of memory that no one writes while the kernel runs; not kept in L1.
__device__ __forceinline__ uint4 load_global_once_16(const void* global) {
  uint4 v;
  asm("ld.global.nc.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
      : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
      : "l"(global));
  return v;
}

// The same of memory that the kernel may write.
__device__ __forceinline__ uint4 load_global_16(const void* global) {
  uint4 v;
  asm volatile("ld.global.L1::no_allocate.v4.u32 {%0, %1, %2, %3}, [%4];"
               : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w)
               : "l"(global)
               : "memory");
  return v;
}

__device__ __forceinline__ uint2 load_global_8(const void* global) {
  uint2 v;
  asm volatile("ld.global.L1::no_allocate.v2.u32 {%0, %1}, [%2];"
               : "=r"(v.x), "=r"(v.y)
               : "l"(global)
               : "memory");
  return v;
}

// Prefetches the cache line of an address to L2. It reads nothing, and later writes of others reach
// L2, too, so it may precede any wait for these writes.

__device__ __forceinline__ void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

// ldmatrix: four 8x8 blocks of 16-bit numbers from shared memory to the registers of a warp.

__device__ __forceinline__ void ldmatrix_x4(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// The same, transposing each block.
__device__ __forceinline__ void ldmatrix_x4_transposed(uint32_t (&r)[4], uint32_t shared) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared)
               : "memory");
}

// Four 8x8 blocks of 16-bit numbers from a warp's registers to shared memory. Lane 8 i + r gives
// the address of row r of block i; register i of lane 4 r + c holds columns 2 c and 2 c + 1 of that
// row.

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

// The transpose of an 8x8 block of 16-bit numbers in a warp's registers: lane l has columns
// 2 (l % 4) and the next of row l / 4, before and after.

__device__ __forceinline__ uint32_t movmatrix(uint32_t word) {
  uint32_t transposed;
  asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(transposed) : "r"(word));
  return transposed;
}

}  // namespace tilemoe::cuda::ptx
