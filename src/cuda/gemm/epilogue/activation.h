// A = act(H) of fragments, in place.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/activations.h"

namespace tilemoe::cuda {

// Applies the activation to two neighbouring columns.
template <bool kGated, class Function>
__device__ __forceinline__ void activate_two(const Function& f, float* gate, const float* up) {
  if constexpr (requires { f.two(gate[0], gate[1], up[0], up[1]); }) {
    f.two(gate[0], gate[1], up[0], up[1]);
  } else {
    gate[0] = f(gate[0], kGated ? up[0] : 0.f);
    gate[1] = f(gate[1], kGated ? up[1] : 0.f);
  }
}

// For fragments that hold gate columns and then the up columns of the same columns of A, or columns
// without a gate: A replaces the first part.
template <Activations kSet, int kFragments, int kNumbers>
__device__ __forceinline__ void activate(const ActivationParams& params,
                                         float (&D)[kFragments][kNumbers]) {
  constexpr bool kGated = kSet != Activations::kPlain;
  constexpr int kUp = kGated ? kNumbers / 2 : kNumbers;  // the first of the up part
  // All at once: a switch over activations inside a loop over slices spilled registers.
  with_activation<kSet>(params, [&](const auto& f) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m)
#pragma unroll
      for (int i = 0; i < kUp; i += 2)
        activate_two<kGated>(f, &D[m][i], &D[m][(kUp + i) % kNumbers]);
  });
}

// Four lanes share a row of eight columns. Lane q has column q (left) and column 4 + q (right); it
// gets columns 2q and 2q + 1. Every lane sends one number to each of two other lanes.
__device__ __forceinline__ float2 side_by_side(float left, float right) {
  const uint32_t lane = threadIdx.x % 4;
  const bool odd = lane & 1, upper = lane & 2;
  const auto from = static_cast<int>((lane & 1) << 1 | lane >> 1);
  const float first = __shfl_sync(kAllLanes, odd ? right : left, from, 4);
  const float second = __shfl_sync(kAllLanes, odd ? left : right, from ^ 1, 4);
  return upper ? float2{second, first} : float2{first, second};
}

// For fragments with interleaved gate/up columns: A replaces the first half of the columns, in a
// fragment's layout.
template <Activations kSet, int kFragments, int kNumbers>
__device__ __forceinline__ void activate_interleaved(const ActivationParams& params,
                                                     float (&D)[kFragments][kNumbers]) {
  with_activation<kSet, false>(params, [&](const auto& f) {
#pragma unroll
    for (int m = 0; m < kFragments; ++m)
#pragma unroll
      for (int j = 0; j < kNumbers / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half) {
          const float* H = &D[m][8 * j + 2 * half];
          const float2 A = side_by_side(f(H[0], H[1]), f(H[4], H[5]));
          D[m][4 * j + 2 * half] = A.x;
          D[m][4 * j + 2 * half + 1] = A.y;
        }
  });
}

}  // namespace tilemoe::cuda
