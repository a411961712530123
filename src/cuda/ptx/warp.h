// Operations of a single warp or thread: elect, its number, pins, dynamic shared memory, ex2 and rcp.
//
// Elects one lane of a warp, the same each time; the compiler knows that it is one.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// All lanes of the warp call it.
__device__ __forceinline__ bool elect_one() {
  uint32_t elected;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "elect.sync _|p, 0xffffffff;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(elected));
  return elected != 0;
}

// The number of the thread in its CTA, read anew each time: threadIdx.x would occupy a register,
// which kernels with many accumulators lack.

__device__ __forceinline__ int32_t thread_index() {
  int32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

// Keeps the compiler from moving accesses of a register, and what makes its value, across a point.

__device__ __forceinline__ void pin(float& value) {
  asm volatile("" : "+f"(value)::"memory");
}
__device__ __forceinline__ void pin(uint32_t& value) {
  asm volatile("" : "+r"(value)::"memory");
}

}  // namespace tilemoe::cuda::ptx

// The dynamic shared memory of a launch.
//   TILEMOE_DYNAMIC_SHARED(float, values, alignof(float));  // float values[]

#define TILEMOE_DYNAMIC_SHARED(type, name, alignment) \
  extern __shared__ __align__(alignment)              \
  type name[]

namespace tilemoe::cuda::ptx {

// 2^x within 2 ulp; results below 2^-126 become 0.

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

// 1 / x within 1 ulp; of infinity and of results below 2^-126, 0.

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tilemoe::cuda::ptx
