// Operand A from rows grouped by expert, by TMA. A tile that reaches past its expert
// brings the next expert's rows along; they meet no row that is stored.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "backend.h"
#include "cuda/core/operand.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/tile.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::load {

template <class Shape>
class DenseRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;
  static constexpr bool kInOrder = true;

  struct Params {
    CUtensorMap rows;  // (1, capacity, width), boxes of (1, BLOCK_M, BLOCK_K)
  };

  static Params params(const tilemoe_tensor& source, const Rows& /*rows*/) {
    return {make_tensor_map({.dtype = kDTypeOf<typename Shape::Element>,
                             .data = source.data,
                             .size = {source.shape[1], source.shape[0], 1},
                             .stride = {source.stride[0], 0},
                             .box = {Shape::BLOCK_K, Shape::BLOCK_M, 1}})};
  }

  __device__ DenseRows(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const { ptx::tma_prefetch_map(&params_.rows); }
  __device__ void begin(const Tile& tile) { row_begin_ = tile.row_begin; }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    ptx::tma_load(shared, &params_.rows, full, k_block * Shape::BLOCK_K, row_begin_, 0);
  }

 private:
  const Params& params_;
  int32_t row_begin_;
};

}  // namespace tilemoe::cuda::load
