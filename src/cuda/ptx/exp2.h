// 2^x within 2 ulp; results below 2^-126 become 0.
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ float exp2_approx(float x) {
  float y;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tilemoe::cuda::ptx
