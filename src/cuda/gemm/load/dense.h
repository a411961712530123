// Loaders of dense operands by TMA: rows grouped by expert as A (rows of a projection; gate and up
// parts as one K) and as B (K of a weight gradient).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/load/gathered.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::load {

template <class Shape>
class DenseRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = Operand::kBytes;
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

// Operand A of the input gradient: dH, whose K is the gate part and then the up part. A part that
// ends inside a k block is padded with zeros, in both operands. A tile that extends past its expert
// also loads rows of the next expert; the results of these rows are not stored.
template <class Shape>
class DensePartRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kBlockColumns = Operand::kRowBytes / 2;  // of 16 bits, in a k block

  struct Params {
    CUtensorMap rows;  // (capacity, parts, n), boxes of (BLOCK_M, 1, BLOCK_K)
    int32_t blocks_a_part;
  };

  // dH: (capacity, parts * columns)
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
    const auto sum = PartOfSum::of<kBlockColumns>(k_block, params_.blocks_a_part);
    ptx::tma_load(shared, &params_.rows, full, sum.begin, sum.part, row_begin_);
  }

 private:
  const Params& params_;
  int32_t row_begin_;
};

// Operand B of a weight gradient: K is the rows of an expert; the columns are in one or two parts.
template <class Shape>
class DenseRowsAsK {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_N>;
  static constexpr int kTmaBytes = Operand::kBytes;

  struct Params {
    CUtensorMap part[2];  // (capacity, n) each, ragged, boxes of (BLOCK_K, 64)
    int32_t blocks_a_part;
  };

  // Without rows the dense matrix may be absent and is not read, but a tensor map requires an
  // address.
  static Params params(const WeightGradient& step) {
    using Element = typename Shape::Element;
    const int64_t columns = step.dense_columns, rows = step.rows.capacity;
    Params params{};
    params.blocks_a_part = static_cast<int32_t>((columns + Shape::BLOCK_N - 1) / Shape::BLOCK_N);
    for (int p = 0; p < step.parts; ++p) {
      const auto& part = step.part[p];
      const void* const matrix = rows > 0 ? step.dense.data : part.out.data;
      params.part[p] =
          make_ragged_map({.dtype = kDTypeOf<Element>,
                           .data = static_cast<const Element*>(matrix) + part.dense_first,
                           .columns = columns,
                           .rows = rows,
                           .row_stride = step.dense.stride[0],
                           .box = {64, Shape::BLOCK_K}});
    }
    if (step.parts == 1) params.part[1] = params.part[0];
    return params;
  }

  __device__ DenseRowsAsK(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    part_ = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    column_ = (tile.n_block - part_ * params_.blocks_a_part) * Operand::kRows;
    row_begin_ = tile.row_begin;
    row_end_ = tile.row_end;
    shared_by_cluster_ = tile.multicast_b;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const int32_t row = kRaggedRows - row_end_ + row_begin_ + k_block * Shape::BLOCK_K;
    load_boxes<kChunks, Shape::kCluster>(*this, shared_by_cluster_, shared, full, row);
  }
  template <class Copy>
  __device__ void load_box(Copy copy, int32_t chunk, uint32_t shared, uint32_t full,
                           int32_t row) const {
    copy.load(shared + chunk * Operand::kChunkBytes, &params_.part[part_], full,
              column_ + chunk * 64, row, row_end_, kRaggedRows);
  }

 private:
  static constexpr int kChunks = Operand::kRows / 64;

  const Params& params_;
  int32_t part_, column_, row_begin_, row_end_;
  bool shared_by_cluster_;
};

}  // namespace tilemoe::cuda::load
