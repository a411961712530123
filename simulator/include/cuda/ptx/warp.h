// Simulated: what a warp or a thread does alone (src/cuda/ptx/warp.h).
#pragma once

#include <cmath>
#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ bool elect_one() {
  return simulator::elect_one_lane();
}

// The number of the thread in its CTA.

__device__ __forceinline__ int32_t thread_index() {
  return simulator::thread_number();
}

// Nothing moves across a call of a function that the compiler does not see.

__device__ __forceinline__ void pin(float&) {}
__device__ __forceinline__ void pin(uint32_t&) {}

}  // namespace tilemoe::cuda::ptx

// The dynamic shared memory of a launch.

#define TILEMOE_DYNAMIC_SHARED(type, name, alignment) \
  type* const name = static_cast<type*>(::tilemoe::simulator::dynamic_shared())

namespace tilemoe::cuda::ptx {

// 2^x within 2 ulp as on hardware, but not the hardware's bits.

__device__ __forceinline__ float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.f : y;
}

// 1 / x within 1 ulp as on hardware, but not the hardware's bits.

__device__ __forceinline__ float reciprocal_approx(float x) {
  const float y = 1.f / x;
  return std::fabs(y) < 0x1p-126f ? std::copysign(0.f, y) : y;
}

}  // namespace tilemoe::cuda::ptx
