// Simulated: the hardware's sixteen barriers of a block (src/cuda/ptx/named_barrier.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
  simulator::named_barrier(barrier, threads, true);
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t threads) {
  simulator::named_barrier(barrier, threads, false);
}

}  // namespace tilemoe::cuda::ptx
