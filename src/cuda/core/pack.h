// 16-bit numbers on the device: two neighbouring ones as one word, eight as 16 bytes. (One by itself
// is routing/half.h's, whose text the host shares.)
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

namespace tilemoe::cuda {

__device__ __forceinline__ uint32_t pack(float low, float high, __nv_bfloat16) {
  const __nv_bfloat162 two = __floats2bfloat162_rn(low, high);
  return reinterpret_cast<const uint32_t&>(two);
}
__device__ __forceinline__ uint32_t pack(float low, float high, __half) {
  const __half2 two = __floats2half2_rn(low, high);
  return reinterpret_cast<const uint32_t&>(two);
}

__device__ __forceinline__ float2 unpack(uint32_t word, __nv_bfloat16) {
  return {__uint_as_float(word << 16), __uint_as_float(word & 0xffff0000u)};
}
__device__ __forceinline__ float2 unpack(uint32_t word, __half) {
  return __half22float2(reinterpret_cast<const __half2&>(word));
}

template <class Element>
__device__ __forceinline__ uint4 pack_eight(const float (&x)[8]) {
  return {pack(x[0], x[1], Element()), pack(x[2], x[3], Element()), pack(x[4], x[5], Element()),
          pack(x[6], x[7], Element())};
}

template <class Element>
__device__ __forceinline__ void unpack_eight(const uint4& words, float (&out)[8]) {
  const uint32_t word[4] = {words.x, words.y, words.z, words.w};
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float2 two = unpack(word[i], Element());
    out[2 * i] = two.x, out[2 * i + 1] = two.y;
  }
}

}  // namespace tilemoe::cuda
