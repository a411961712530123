// Neighbouring rows of one expert's weights, as TMA brings them for operand B.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/core/tensor_map.h"

namespace tilemoe::cuda::load {

template <Major kMajor, int kRows_>
struct WeightBox {
  static constexpr int kRows = kRows_;
  using Operand = StagedOperand<kMajor, kRows>;

  // Of W (E, rows, sum). K-major: a map (E, rows, sum), boxes of (1, kRows, BLOCK_K); MN-major: one
  // of (E, sum, rows), boxes of (1, BLOCK_K, 64).
  template <class Shape>
  static CUtensorMap map(const tilemoe_tensor& W) {
    const int64_t E = W.shape[0], rows = W.shape[1], sum = W.shape[2];
    const tilemoe_dtype dtype = kDTypeOf<typename Shape::Recipe::B>;
    if constexpr (kMajor == Major::kK)
      return make_tensor_map({.dtype = dtype,
                              .data = W.data,
                              .size = {sum, rows, E},
                              .stride = {W.stride[1], W.stride[0]},
                              .box = {Shape::BLOCK_K, kRows, 1}});
    else
      return make_tensor_map({.dtype = dtype,
                              .data = W.data,
                              .size = {rows, sum, E},
                              .stride = {W.stride[2], W.stride[0]},
                              .box = {64, Shape::BLOCK_K, 1}});
  }

  template <class Copy>
  __device__ static void load(Copy copy, uint32_t shared, const CUtensorMap* map, uint32_t full,
                              int32_t first_row, int32_t sum, int32_t expert) {
    if constexpr (kMajor == Major::kK) {
      copy.load(shared, map, full, sum, first_row, expert);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kRows / 64; ++chunk)
        copy.load(shared + chunk * Operand::kChunkBytes, map, full, first_row + chunk * 64, sum,
                  expert);
    }
  }
};

}  // namespace tilemoe::cuda::load
