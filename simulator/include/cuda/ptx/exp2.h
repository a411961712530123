// Simulated: 2^x (src/cuda/ptx/exp2.h). Within its 2 ulp, but not the hardware's bits.
#pragma once

#include <cmath>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ float exp2_approx(float x) {
  const float y = std::exp2(x);
  return y < 0x1p-126f ? 0.f : y;
}

}  // namespace tilemoe::cuda::ptx
