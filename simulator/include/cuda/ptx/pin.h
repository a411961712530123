// Simulated: nothing moves across a point that calls what the compiler does not see
// (src/cuda/ptx/pin.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void pin(float&) {}
__device__ __forceinline__ void pin(uint32_t&) {}

}  // namespace tilemoe::cuda::ptx
