// 16 or 8 bytes at a time.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

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

}  // namespace tilemoe::cuda::ptx
