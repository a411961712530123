// Operands of a product that sums over an expert's rows. A stage is BLOCK_K rows of the expert by
// the operand's block of columns, as chunks of 64 columns; rows past the expert's last are zeros in
// both operands, since 0 times what lies there may be NaN.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/gather_source.h"
#include "cuda/core/operand.h"
#include "cuda/core/tensor_map.h"
#include "cuda/core/tile.h"
#include "cuda/core/warp.h"
#include "cuda/core/weight_gradient.h"
#include "cuda/load/cluster_boxes.h"
#include "cuda/load/loader.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda::load {

// Operand A from rows that lie anywhere: row r of the sum is row token[r] of the source, or row r
// itself where there is no token list. Copied by all threads of the producer, 16 bytes at a time;
// eight neighbouring threads read one row's 128 bytes. Columns past the source's width are zeros
// too.
//
// The producer's instructions are what limits these kernels. So a lane looks up one row for its
// whole warp, two k blocks ahead; and what a copy needs beside the row is known to the tile.
template <class Shape>
class GatheredSummedRows {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = 0;
  static constexpr int kThreadArrivals = kProducerThreads;

  using Params = GatherSource;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    return gather_source(source, rows);
  }

  __device__ GatheredSummedRows(const Params& params, int32_t thread)
      : params_(params),
        row_in_warp_(thread % kWarp / kPieces),
        piece_(thread % kPieces),
        shared_offset_(thread / kPieces * Operand::kRowBytes +
                       swizzled_chunk(thread / kPieces, piece_)) {}

  __device__ void prefetch() const {}

  __device__ void begin(const Tile& tile) {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t pass = thread % kWarpRows / kRowsAPass, row = thread % kRowsAPass;
    next_row_ = tile.row_begin + pass * kRowsAtOnce + thread / kWarp * kRowsAPass + row;
    row_end_ = tile.row_end;
    const int32_t column = tile.m_block * kChunks * Operand::kRowBytes + piece_ * 16;  // in bytes
    first_ = static_cast<const char*>(params_.source) + column;
#pragma unroll
    for (int chunk = 0; chunk < kChunks; ++chunk)
      inside_[chunk] = column + chunk * Operand::kRowBytes < params_.width_bytes;
    soon_ = look_up();
    later_ = look_up();
  }

  // All lanes of a warp call it.
  __device__ void copy(uint32_t shared, int32_t /*k_block*/) {
    const int32_t now = soon_;
    soon_ = later_;
    later_ = look_up();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t source_row = __shfl_sync(0xffffffff, now, i * kRowsAPass + row_in_warp_);
      const char* row = first_ + static_cast<uint64_t>(static_cast<uint32_t>(source_row)) *
                                     params_.row_bytes;  // not read where there is none
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        ptx::cp_async_16(shared + shared_offset_ + chunk * Operand::kChunkBytes +
                             i * kRowsAtOnce * Operand::kRowBytes,
                         row + chunk * Operand::kRowBytes,
                         source_row != kNone && inside_[chunk] ? 16 : 0);
    }
  }

 private:
  static constexpr int kPieces = Operand::kRowBytes / 16;
  static constexpr int kChunks = Operand::kRows / 64;
  static constexpr int kRowsAtOnce = kProducerThreads / kPieces;
  static constexpr int kRowsAPass = kWarp / kPieces;  // of a warp
  static constexpr int kPasses = Shape::BLOCK_K / kRowsAtOnce;
  static constexpr int kWarpRows = kPasses * kRowsAPass;  // of a k block
  static constexpr int32_t kNone = -1;
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows all have the same place in their atom");
  static_assert(kWarp % kWarpRows == 0, "a lane looks up one row");

  // This lane's row of the k block after the last one asked for.
  __device__ int32_t look_up() {
    const int32_t row = next_row_;
    next_row_ += Shape::BLOCK_K;
    if (row >= row_end_) return kNone;
    return params_.token ? params_.token[row] : row;
  }

  const Params& params_;
  int32_t row_in_warp_, piece_;
  uint32_t shared_offset_;
  const char* first_;  // of this thread's columns, in row 0
  bool inside_[kChunks];
  int32_t next_row_, row_end_;
  int32_t soon_, later_;  // source rows of the next k block and of the one after it
};

// Operand B from rows grouped by expert, of one or two parts of columns, by TMA.
template <class Shape>
class DenseSummedRows {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_N>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;

  struct Params {
    CUtensorMap part[2];  // (capacity, n) each, ragged, boxes of (BLOCK_K, 64)
    int32_t blocks_a_part;
  };

  // Without rows there may be no dense matrix, and none is read; a map has an address all the same.
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

  __device__ DenseSummedRows(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    part_ = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    column_ = (tile.n_block - part_ * params_.blocks_a_part) * Operand::kRows;
    row_begin_ = tile.row_begin;
    row_end_ = tile.row_end;
    shared_by_cluster_ = tile.shares_b;
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
