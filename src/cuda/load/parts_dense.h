// Operands of a product whose sum runs over the gate part and then the up part, by TMA:
// dH, whose rows are (parts, n), and W1, whose parts lie one after the other, interleaved or in two
// tensors. A part that ends inside a k block is filled up with zeros, in both operands alike.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/core/part_of_sum.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/load/cluster_boxes.h"
#include "cuda/load/weight_box.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::load {

// Operand A from rows grouped by expert. A tile that reaches past its expert brings the next
// expert's rows along; they meet no row that is stored.
template <class Shape>
class DensePartRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;

  struct Params {
    CUtensorMap rows;  // (capacity, parts, n), boxes of (BLOCK_M, 1, BLOCK_K)
    int32_t blocks_a_part;
  };

  // Of dH (capacity, parts * columns).
  static Params params(const tilemoe_tensor& dH, int64_t parts, int64_t columns) {
    return {.rows = make_tensor_map({.dtype = kDTypeOf<typename Shape::Element>,
                                     .data = dH.data,
                                     .size = {columns, parts, dH.shape[0]},
                                     .stride = {columns, dH.stride[0]},
                                     .box = {Shape::BLOCK_K, 1, Shape::BLOCK_M}}),
            .blocks_a_part = k_blocks_of_a_part<Shape>(columns)};
  }

  __device__ DensePartRows(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const { ptx::tma_prefetch_map(&params_.rows); }
  __device__ void begin(const Tile& tile) { row_begin_ = tile.row_begin; }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const auto sum = PartOfSum::of<Shape::BLOCK_K>(k_block, params_.blocks_a_part);
    ptx::tma_load(shared, &params_.rows, full, sum.begin, sum.part, row_begin_);
  }

 private:
  const Params& params_;
  int32_t row_begin_;
};

}  // namespace tilemoe::cuda::load
