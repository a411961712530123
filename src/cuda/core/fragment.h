// A warp and its fragments: the layout of a warp's part of a GEMM tile, 16-bit words, biases.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "core/check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

constexpr int kWarp = 32;                   // threads
constexpr uint32_t kAllLanes = 0xffffffff;  // the mask of a warp's threads

// The layout of fragments: a warp has its part of a GEMM tile as fragments of 16 rows by N columns,
// in the order of mma.m16n8's C fragment, one below the other. wgmma and mma.sync produce this
// layout, and tensor memory can be read in it. The arithmetic of an epilogue takes fragments; an
// arch defines where the fragments of a warp lie in the tile (Shape::fragment_row()), and when the
// arithmetic runs.

// Number 4 j + i of a lane: row lane / 4 + 8 (i / 2), column 8 j + 2 (lane % 4) + i % 2.
template <int kFragments, int kColumns>
using AccumulatorFragments = float[kFragments][kColumns / 2];

namespace fragment {

constexpr int kRows = 16;

__device__ __forceinline__ int32_t lane() {
  return static_cast<int32_t>(threadIdx.x % kWarp);
}
// Of this lane's numbers 4 j + 2 half and the next.
__device__ __forceinline__ int32_t row(int half) {
  return lane() / 4 + 8 * half;
}
// Of this lane's numbers 4 j and 4 j + 2; the column after it is that of the next.
__device__ __forceinline__ int32_t column(int j = 0) {
  return 8 * j + lane() % 4 * 2;
}

}  // namespace fragment

// 16-bit numbers on the device: two adjacent ones as one word, eight as 16 bytes. (core/numbers.h
// has the functions of a single number, which the host shares.)

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

// A bias of each expert, added to the fragments of a GEMM.

struct Bias {
  const void* data = nullptr;  // (E, columns) of the GEMM's type; null: none
  int64_t expert_stride = 0;   // in elements
  int32_t column_stride = 1;   // 2 where gate and up alternate
  int32_t columns = 0;
};

// From `b` (E, columns); no bias if it is absent.
inline Bias bias_of(const tilemoe_tensor& b) {
  if (!present(b)) return {};
  return {.data = b.data,
          .expert_stride = b.stride[0],
          .column_stride = static_cast<int32_t>(b.stride[1]),
          .columns = static_cast<int32_t>(b.shape[1])};
}

// Added to kColumns columns of fragments, which begin at column `column` of the bias and at a
// lane's number kFirst. The loads of a batch begin before the first sum: a load takes hundreds of
// cycles, in which no MMA runs.
template <class Element, int kFirst, int kColumns, int kFragments, int kNumbers>
__device__ __forceinline__ void add_bias(const Bias& bias, int32_t expert, int32_t column,
                                         float (&D)[kFragments][kNumbers]) {
  if (bias.data == nullptr) return;
  constexpr int kPairs = kColumns / 8, kBatch = kPairs % 8 == 0 ? 8 : kPairs;  // of columns
  const int32_t lane_column = column + fragment::column(), left = bias.columns - lane_column;
  const auto* at = static_cast<const Element*>(bias.data) + expert * bias.expert_stride +
                   lane_column * bias.column_stride;
#pragma unroll
  for (int first = 0; first < kPairs; first += kBatch) {
    Element low[kBatch], high[kBatch];
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const int32_t c = 8 * (first + j);
      low[j] = c < left ? at[c * bias.column_stride] : Element(0.0F);
      high[j] = c < left ? at[(c + 1) * bias.column_stride] : Element(0.0F);
    }
#pragma unroll
    for (int j = 0; j < kBatch; ++j) {
      const auto even = static_cast<float>(low[j]), odd = static_cast<float>(high[j]);
#pragma unroll
      for (int m = 0; m < kFragments; ++m) {
        float* d = &D[m][kFirst + 4 * (first + j)];
        d[0] += even, d[1] += odd, d[2] += even, d[3] += odd;
      }
    }
  }
}

}  // namespace tilemoe::cuda
