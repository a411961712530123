// Simulated: 1 / x (src/cuda/ptx/reciprocal.h). Within its 1 ulp, but not the hardware's bits.
#pragma once

#include <cmath>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ float reciprocal_approx(float x) {
  const float y = 1.f / x;
  return std::fabs(y) < 0x1p-126f ? std::copysign(0.f, y) : y;
}

}  // namespace tilemoe::cuda::ptx
