// A bias of each expert, added to accumulators.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <cstdint>

#include "cuda/sm90/shape.h"

namespace tilemoe::cuda {

struct Bias {
  const void* data = nullptr;  // (E, columns); null: none
  int64_t expert_stride = 0;   // in elements
  int32_t column_stride = 1;   // 2 where gate and up alternate
  int32_t columns = 0;
};

// To kColumns columns of a tile, which begin at column `column` of the bias and at accumulator
// kFirst.
template <class Shape, int kFirst, int kColumns>
__device__ __forceinline__ void add_bias(const Bias& bias, int32_t expert, int32_t column,
                                         Accumulators<Shape>& D) {
  using Element = typename Shape::Element;
  if (bias.data == nullptr) return;
  const auto* row = static_cast<const Element*>(bias.data) + expert * bias.expert_stride;
  const int32_t lane_column = column + static_cast<int32_t>(threadIdx.x % 4) * 2;
#pragma unroll
  for (int j = 0; j < kColumns / 8; ++j) {
    const int32_t c = lane_column + 8 * j;
    if (c >= bias.columns) break;
    const auto low = static_cast<float>(row[c * bias.column_stride]);
    const auto high = static_cast<float>(row[(c + 1) * bias.column_stride]);
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m) {
      float* d = &D[m][kFirst + 4 * j];
      d[0] += low, d[1] += high, d[2] += low, d[3] += high;
    }
  }
}

}  // namespace tilemoe::cuda
