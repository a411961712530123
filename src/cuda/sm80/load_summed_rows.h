// Operands of a product that sums over an expert's rows. A stage is BLOCK_K rows of the expert by
// the operand's block of columns, as chunks of 64 columns; rows past the expert's last are zeros in
// both operands, since 0 times what lies there may be NaN.
#pragma once

#include <cstdint>

#include "cuda/core/gather_source.h"
#include "cuda/core/operand.h"
#include "cuda/core/tile.h"
#include "cuda/sm80/stage_rows.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda::sm80 {

// Operand A from rows that lie anywhere: row r of the sum is row token[r] of the source, or row r
// itself where there is no token list; looked up one k block ahead. Columns past the source's width
// are zeros too.
template <class Shape>
class GatheredSummedRows {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_M>;
  using Params = GatherSource;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    return gather_source(source, rows);
  }

  __device__ GatheredSummedRows(const Params& params, int32_t thread)
      : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    next_row_ = tile.row_begin + stage_.row();
    row_end_ = tile.row_end;
    const int32_t column = tile.m_block * kChunks * Operand::kRowBytes + stage_.byte();
    first_ = static_cast<const char*>(params_.source) + column;
    width_left_ = params_.width_bytes - column;
    look_up();
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t /*blocks_left*/) const {
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const char* const row = first_ + static_cast<uint64_t>(source_row_[i]) * params_.row_bytes;
      const bool exists = source_row_[i] != kNone;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        stage_.copy(shared + chunk * Operand::kChunkBytes, i, row + chunk * Operand::kRowBytes,
                    exists && width_left_ > chunk * Operand::kRowBytes);
    }
  }
  __device__ __forceinline__ void advance(int32_t /*blocks_left*/) {
    look_up();
  }

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_K>;
  static constexpr int kChunks = Shape::BLOCK_M / 64;
  static constexpr uint32_t kNone = 0xffffffff;

  // This thread's rows of the next k block.
  __device__ __forceinline__ void look_up() {
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const int32_t row = next_row_ + i * Stage::kAtOnce;
      const bool exists = row < row_end_;
      source_row_[i] = exists ? static_cast<uint32_t>(row) : kNone;
      if (exists & (params_.token != nullptr))  // one branch
        source_row_[i] = static_cast<uint32_t>(params_.token[row]);
    }
    next_row_ += Shape::BLOCK_K;
  }

  const Params& params_;
  Stage stage_;
  const char* first_;   // this thread's piece of the source's row 0
  int32_t width_left_;  // bytes of a row from there
  int32_t next_row_, row_end_;
  uint32_t source_row_[Stage::kPasses];
};

// Operand B from rows grouped by expert, of one or two parts of columns.
template <class Shape>
class DenseSummedRows {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_N>;

  struct Params {
    const char* part[2];  // (capacity, columns) each
    int64_t row_bytes;
    int32_t columns, blocks_a_part;
  };

  static Params params(const WeightGradient& step) {
    const int64_t columns = step.dense_columns;
    Params params{
        .part = {},
        .row_bytes = step.dense.stride[0] * kElementBytes,
        .columns = static_cast<int32_t>(columns),
        .blocks_a_part = static_cast<int32_t>((columns + Shape::BLOCK_N - 1) / Shape::BLOCK_N)};
    for (int p = 0; p < step.parts; ++p)
      params.part[p] =
          static_cast<const char*>(step.dense.data) + step.part[p].dense_first * kElementBytes;
    return params;
  }

  __device__ DenseSummedRows(const Params& params, int32_t thread)
      : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    const int32_t part = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    const int32_t column = (tile.n_block - part * params_.blocks_a_part) * Shape::BLOCK_N +
                           stage_.piece() * kPieceColumns;
    const int32_t row = tile.row_begin + stage_.row();
    from_ = params_.part[part] + row * params_.row_bytes + int64_t{column} * kElementBytes;
    rows_left_ = tile.row_end - row;
    columns_left_ = params_.columns - column;
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t /*blocks_left*/) const {
    const auto row_bytes = static_cast<uint32_t>(params_.row_bytes);
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const bool exists = rows_left_ > i * Stage::kAtOnce;
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        stage_.copy(shared + chunk * Operand::kChunkBytes, i,
                    from_ + uint64_t{row_bytes} * (static_cast<uint32_t>(i) * Stage::kAtOnce) +
                        chunk * Operand::kRowBytes,
                    exists && columns_left_ > chunk * 64);
    }
  }
  __device__ __forceinline__ void advance(int32_t /*blocks_left*/) {
    from_ += uint64_t{static_cast<uint32_t>(params_.row_bytes)} * Shape::BLOCK_K;
    rows_left_ -= Shape::BLOCK_K;
  }

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_K>;
  static constexpr int64_t kElementBytes = sizeof(typename Shape::Element);
  static constexpr int kPieceColumns = Stage::kPieceBytes / kElementBytes;
  static constexpr int kChunks = Shape::BLOCK_N / 64;

  const Params& params_;
  Stage stage_;
  const char* from_;  // this thread's piece of the next k block, of its first row
  int32_t rows_left_, columns_left_;
};

}  // namespace tilemoe::cuda::sm80
