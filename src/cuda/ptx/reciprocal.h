// 1 / x within 1 ulp; of infinity and of results below 2^-126, 0.
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ float reciprocal_approx(float x) {
  float y;
  asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
  return y;
}

}  // namespace tilemoe::cuda::ptx
