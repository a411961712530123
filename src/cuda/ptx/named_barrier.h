// The hardware's sixteen barriers of a block. Number 0 is __syncthreads().
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Waits until `threads` threads have arrived or waited.
__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

}  // namespace tilemoe::cuda::ptx
