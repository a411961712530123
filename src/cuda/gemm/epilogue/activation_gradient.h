// The arithmetic of the activation gradient, 16 columns of a fragment at a time, with 16-bit inputs
// and outputs. From dA' and the stored H it computes A = act(H) again, dH = act'(H) (s dA'), A' = s
// A and the row sums <dA', A>.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/activations.h"

namespace tilemoe::cuda {

// A lane's numbers of 16 columns of a fragment: word i has numbers 2 i and 2 i + 1, which are in
// the upper 8 rows if i is even.
using PackedBlock = uint32_t[4];

// Gate and up of two neighbouring columns, or the two columns of H if the activation has no gate.
template <class Function>
__device__ __forceinline__ void differentiate_two(const Function& f, float2 gate, float2 up,
                                                  float2& A, float2& gate_slope, float2& up_slope) {
  if constexpr (requires { f.two(gate, up, A, gate_slope, up_slope); }) {
    f.two(gate, up, A, gate_slope, up_slope);
  } else {
    A.x = f(gate.x, up.x, gate_slope.x, up_slope.x);
    A.y = f(gate.y, up.y, gate_slope.y, up_slope.y);
  }
}

// dH replaces H. dA has the block's 8 numbers, s the scores of the lane's upper and lower row. The
// columns' terms of these rows' sums are added to ds in ascending order.
template <class Element, Activations kSet, class Function>
__device__ __forceinline__ void differentiate_block(const Function& f, PackedBlock& gate,
                                                    PackedBlock& up, PackedBlock& A_scaled,
                                                    const float* dA, const float (&s)[2],
                                                    float (&ds)[2]) {
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    const float score = s[i % 2];
    const float2 g = unpack(gate[i], Element()), u = unpack(up[i], Element());
    float2 gate_slope, up_slope, A;
    differentiate_two(f, g, u, A, gate_slope, up_slope);
    const float* const two = &dA[2 * i];
    ds[i % 2] = fmaf(two[1], A.y, fmaf(two[0], A.x, ds[i % 2]));
    const float low = score * two[0], high = score * two[1];
    gate[i] = pack(gate_slope.x * low, gate_slope.y * high, Element());
    if constexpr (kSet != Activations::kPlain)
      up[i] = pack(up_slope.x * low, up_slope.y * high, Element());
    A_scaled[i] = pack(score * A.x, score * A.y, Element());
  }
}

// Reduces the sums of a group of columns over the four lanes that share two rows: even lanes get
// the sum of the upper row, odd lanes that of the lower row (fragment::row(lane % 2)). The order is
// lane xor 1, then lane xor 2: a lane first sends its part of the other row to its neighbour.
__device__ __forceinline__ float ds_of_row(const float (&ds)[2]) {
  const bool odd = fragment::lane() % 2 != 0;
  float sum = odd ? ds[1] : ds[0];
  sum += __shfl_xor_sync(kAllLanes, odd ? ds[0] : ds[1], 1);
  return sum + __shfl_xor_sync(kAllLanes, sum, 2);
}

}  // namespace tilemoe::cuda
