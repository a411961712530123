// Simulated: there are no caches (src/cuda/ptx/prefetch.h).
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void prefetch_to_l2(const void*) {}

}  // namespace tilemoe::cuda::ptx
