// Eight float32 from 16 bytes of a 16-bit type.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace tilemoe::cuda {

template <class Element>
__device__ __forceinline__ void widen(const uint4& bytes, float (&out)[8]);

template <>
__device__ __forceinline__ void widen<__nv_bfloat16>(const uint4& bytes, float (&out)[8]) {
  const auto* pairs = reinterpret_cast<const __nv_bfloat162*>(&bytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __bfloat1622float2(pairs[i]);
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}

template <>
__device__ __forceinline__ void widen<__half>(const uint4& bytes, float (&out)[8]) {
  const auto* pairs = reinterpret_cast<const __half2*>(&bytes);
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 pair = __half22float2(pairs[i]);
    out[2 * i] = pair.x, out[2 * i + 1] = pair.y;
  }
}

}  // namespace tilemoe::cuda
