// Operand A from rows, K-major. Rows past the expert's last and columns past the source's width are
// zeros.
#pragma once

#include <cstdint>

#include "backend.h"
#include "cuda/core/gather_source.h"
#include "cuda/core/operand.h"
#include "cuda/core/part_of_sum.h"
#include "cuda/core/tile.h"
#include "cuda/sm80/stage_rows.h"

namespace tilemoe::cuda::sm80 {

// Row r of the tile is row token[row_begin + r] of the source, or row row_begin + r itself where
// there is no token list.
template <class Shape, bool kGathers>
class SourceRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  using Params = GatherSource;
  static constexpr bool kInOrder = !kGathers;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    Params params = gather_source(source, rows);
    if constexpr (!kGathers) params.token = nullptr;
    return params;
  }

  __device__ SourceRows(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    whole_ = tile.row_begin + Shape::BLOCK_M <= tile.row_end;
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const int32_t row = tile.row_begin + stage_.row() + i * Stage::kAtOnce;
      if (row >= tile.row_end || !stage_.has(i))
        source_row_[i] = kNone;
      else if (kGathers && params_.token != nullptr)
        source_row_[i] = static_cast<uint32_t>(params_.token[row]);
      else
        source_row_[i] = static_cast<uint32_t>(row);
    }
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t k_block) const {
    const int32_t column = k_block * Stage::kRowBytes + stage_.byte();  // in bytes
    const char* const first = static_cast<const char*>(params_.source) + column;
    const auto copy_rows = [&](const auto& exists) {
#pragma unroll
      for (int i = 0; i < Stage::kPasses; ++i)
        stage_.copy(shared, i, first + static_cast<uint64_t>(source_row_[i]) * params_.row_bytes,
                    exists(i));
    };
    if (whole_ && (k_block + 1) * Stage::kRowBytes <= params_.width_bytes)
      copy_rows([](int) { return true; });
    else
      copy_rows([&](int i) { return column < params_.width_bytes && source_row_[i] != kNone; });
  }

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_M>;
  static constexpr uint32_t kNone = 0xffffffff;

  const Params& params_;
  Stage stage_;
  bool whole_;  // every row of the tile exists
  uint32_t source_row_[Stage::kPasses];
};

// Rows of parts of columns, summed over all of them: dH.
template <class Shape>
class PartRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;

  struct Params {
    const char* rows;
    int64_t row_bytes;
    int32_t columns;  // of a part; the next one follows
    int32_t blocks_a_part;
  };

  // Of dH (capacity, parts * columns).
  static Params params(const tilemoe_tensor& dH, int64_t /*parts*/, int64_t columns) {
    return {.rows = static_cast<const char*>(dH.data),
            .row_bytes = dH.stride[0] * int64_t{sizeof(typename Shape::Element)},
            .columns = static_cast<int32_t>(columns),
            .blocks_a_part = k_blocks_of_a_part<Shape>(columns)};
  }

  __device__ PartRows(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    row_ = tile.row_begin + stage_.row();
    row_end_ = tile.row_end;
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t k_block) const {
    const auto sum = PartOfSum::of<Shape::BLOCK_K>(k_block, params_.blocks_a_part);
    const int32_t column = sum.begin + stage_.piece() * kPieceColumns;
    const char* const first = params_.rows + row_ * params_.row_bytes +
                              (int64_t{sum.part} * params_.columns + column) * kElementBytes;
    const auto copy_rows = [&](const auto& exists) {
#pragma unroll
      for (int i = 0; i < Stage::kPasses; ++i)
        stage_.copy(
            shared, i,
            first + static_cast<uint64_t>(pass_bytes(params_.row_bytes)) * static_cast<uint32_t>(i),
            exists(i));
    };
    if (row_ - stage_.row() + Shape::BLOCK_M <= row_end_ &&
        sum.begin + Shape::BLOCK_K <= params_.columns)
      copy_rows([](int) { return true; });
    else
      copy_rows(
          [&](int i) { return column < params_.columns && row_ + i * Stage::kAtOnce < row_end_; });
  }

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_M>;
  static constexpr int kElementBytes = sizeof(typename Shape::Element);
  static constexpr int kPieceColumns = Stage::kPieceBytes / kElementBytes;

  // From one pass to the next: 32 bits, so that an address is one multiplication.
  __device__ static uint32_t pass_bytes(int64_t row_bytes) {
    return static_cast<uint32_t>(row_bytes) * Stage::kAtOnce;
  }

  const Params& params_;
  Stage stage_;
  int32_t row_, row_end_;
};

}  // namespace tilemoe::cuda::sm80
