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
    column_ = tile.m_block * kChunks * Operand::kRowBytes + stage_.byte();
    look_up();
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t /*k_block*/) {
    const char* const first = static_cast<const char*>(params_.source) + column_;
    const auto copy_rows = [&](const auto& exists) {
#pragma unroll
      for (int i = 0; i < Stage::kPasses; ++i) {
        const char* const row = first + static_cast<uint64_t>(source_row_[i]) * params_.row_bytes;
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
          stage_.copy(shared + chunk * Operand::kChunkBytes, i, row + chunk * Operand::kRowBytes,
                      exists(i, chunk));
      }
    };
    // next_row_ is a k block further.
    const bool whole =
        next_row_ - stage_.row() <= row_end_ &&
        column_ - stage_.byte() + kChunks * Operand::kRowBytes <= params_.width_bytes;
    if (whole)
      copy_rows([](int, int) { return true; });
    else
      copy_rows([&](int i, int chunk) {
        return source_row_[i] != kNone &&
               column_ + chunk * Operand::kRowBytes < params_.width_bytes;
      });
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
      source_row_[i] =
          row >= row_end_
              ? kNone
              : static_cast<uint32_t>(params_.token != nullptr ? params_.token[row] : row);
    }
    next_row_ += Shape::BLOCK_K;
  }

  const Params& params_;
  Stage stage_;
  int32_t next_row_, row_end_, column_;  // the latter in bytes
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
    part_ = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    column_ = (tile.n_block - part_ * params_.blocks_a_part) * Shape::BLOCK_N +
              stage_.piece() * kPieceColumns;
    row_ = tile.row_begin + stage_.row();
    row_end_ = tile.row_end;
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t k_block) const {
    const int32_t row = row_ + k_block * Shape::BLOCK_K;
    const char* const first =
        params_.part[part_] + row * params_.row_bytes + int64_t{column_} * kElementBytes;
    const auto pass_bytes = static_cast<uint32_t>(params_.row_bytes) * Stage::kAtOnce;
    const auto copy_rows = [&](const auto& exists) {
#pragma unroll
      for (int i = 0; i < Stage::kPasses; ++i)
#pragma unroll
        for (int chunk = 0; chunk < kChunks; ++chunk)
          stage_.copy(shared + chunk * Operand::kChunkBytes, i,
                      first + static_cast<uint64_t>(pass_bytes) * static_cast<uint32_t>(i) +
                          chunk * Operand::kRowBytes,
                      exists(i, chunk));
    };
    const bool whole = row - stage_.row() + Shape::BLOCK_K <= row_end_ &&
                       column_ - stage_.piece() * kPieceColumns + Shape::BLOCK_N <= params_.columns;
    if (whole)
      copy_rows([](int, int) { return true; });
    else
      copy_rows([&](int i, int chunk) {
        return row + i * Stage::kAtOnce < row_end_ && column_ + chunk * 64 < params_.columns;
      });
  }

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_K>;
  static constexpr int64_t kElementBytes = sizeof(typename Shape::Element);
  static constexpr int kPieceColumns = Stage::kPieceBytes / kElementBytes;
  static constexpr int kChunks = Shape::BLOCK_N / 64;

  const Params& params_;
  Stage stage_;
  int32_t part_, column_, row_, row_end_;
};

}  // namespace tilemoe::cuda::sm80
