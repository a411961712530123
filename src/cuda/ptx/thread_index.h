// The thread's number in its block, read anew each time: threadIdx.x would be kept in a register,
// which kernels with many accumulators do not have.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ int32_t thread_index() {
  int32_t index;
  asm volatile("mov.u32 %0, %%tid.x;" : "=r"(index));
  return index;
}

}  // namespace tilemoe::cuda::ptx
