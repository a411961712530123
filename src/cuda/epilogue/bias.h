// A bias of each expert, added to a product's slabs.
#pragma once

#include <cstdint>

#include "check.h"
#include "cuda/core/slab.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

struct Bias {
  const void* data = nullptr;  // (E, columns) of the product's type; null: none
  int64_t expert_stride = 0;   // in elements
  int32_t column_stride = 1;   // 2 where gate and up alternate
  int32_t columns = 0;
};

// Of `b` (E, columns); none where it is absent.
inline Bias bias_of(const tilemoe_tensor& b) {
  if (!present(b)) return {};
  return {.data = b.data,
          .expert_stride = b.stride[0],
          .column_stride = static_cast<int32_t>(b.stride[1]),
          .columns = static_cast<int32_t>(b.shape[1])};
}

// To kColumns columns of slabs, which begin at column `column` of the bias and at a lane's number
// kFirst.
template <class Element, int kFirst, int kColumns, int kSlabs, int kNumbers>
__device__ __forceinline__ void add_bias(const Bias& bias, int32_t expert, int32_t column,
                                         float (&D)[kSlabs][kNumbers]) {
  if (bias.data == nullptr) return;
  const auto* row = static_cast<const Element*>(bias.data) + expert * bias.expert_stride;
  const int32_t lane_column = column + slab::column();
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int32_t c = lane_column + 8 * j;
    if (c >= bias.columns) break;
    const auto low = static_cast<float>(row[c * bias.column_stride]);
    const auto high = static_cast<float>(row[(c + 1) * bias.column_stride]);
#pragma unroll
    for (int m = 0; m < kSlabs; ++m) {
      float* d = &D[m][kFirst + 4 * j];
      d[0] += low, d[1] += high, d[2] += low, d[3] += high;
    }
  }
}

}  // namespace tilemoe::cuda
