// Simulated: one lane of a warp (src/cuda/ptx/elect.h).
#pragma once

#include <cmath>
#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ bool elect_one() {
  return simulator::elect_one_lane();
}

// Simulated: the thread's number in its block (src/cuda/ptx/thread_index.h).

__device__ __forceinline__ int32_t thread_index() {
  return simulator::thread_number();
}

// Simulated: nothing moves across a point that calls what the compiler does not see
// (src/cuda/ptx/pin.h).

__device__ __forceinline__ void pin(float&) {}
__device__ __forceinline__ void pin(uint32_t&) {}

}  // namespace tilemoe::cuda::ptx

// Simulated: the shared memory that a launch asks for (src/cuda/ptx/dynamic_shared.h).

#define TILEMOE_DYNAMIC_SHARED(type, name, alignment) \
  type* const name = static_cast<type*>(::tilemoe::simulator::dynamic_shared())

namespace tilemoe::cuda::ptx {

// Simulated: 2^x (src/cuda/ptx/exp2.h). Within its 2 ulp, but not the hardware's bits.

__device__ __forceinline__ float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.f : y;
}

// Simulated: 1 / x (src/cuda/ptx/reciprocal.h). Within its 1 ulp, but not the hardware's bits.

__device__ __forceinline__ float reciprocal_approx(float x) {
  const float y = 1.f / x;
  return std::fabs(y) < 0x1p-126f ? std::copysign(0.f, y) : y;
}

}  // namespace tilemoe::cuda::ptx
