// Operands of sm80 from rows, by cp.async: A by expert or gathered, and both operands of the weight
// gradients.
#pragma once

#include <cstdint>

#include "core/step_arguments.h"
#include "cuda/gemm/load/gathered.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/load/weights.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda::sm80 {

// A thread's part of a stage: kRows rows of 128 bytes. A thread copies 16 bytes at a time, eight
// adjacent threads copy a row, and all kThreads threads copy the rows in passes.
template <int kThreads, int kRows>
class StageRows {
 public:
  static constexpr int kRowBytes = 128;
  static constexpr int kPieceBytes = 16;
  static constexpr int kPieces = kRowBytes / kPieceBytes;  // of a row
  static constexpr int kAtOnce = kThreads / kPieces;
  static constexpr int kPasses = (kRows + kAtOnce - 1) / kAtOnce;
  static_assert(kAtOnce % 4 == 0);

  __device__ explicit StageRows(int32_t thread)
      : row_(thread / kPieces),
        piece_(thread % kPieces),
        offset_(row_ * kRowBytes + swizzled_chunk(row_, piece_)) {}

  __device__ int32_t row() const { return row_; }  // in the first pass; each pass adds kAtOnce
  __device__ int32_t piece() const { return piece_; }
  __device__ int32_t byte() const { return piece_ * kPieceBytes; }

  // Whether the thread has a row in a pass: a constant if all threads have one.
  __device__ bool has(int pass) const {
    return (pass + 1) * kAtOnce <= kRows || row_ + pass * kAtOnce < kRows;
  }
  // Copies the piece of that pass; writes zeros if `valid` is false.
  __device__ __forceinline__ void copy(uint32_t shared, int pass, const char* source,
                                       bool valid) const {
    if (has(pass)) ptx::cp_async_16(place(shared, pass), source, valid ? 16 : 0);
  }

 private:
  // Half a swizzle atom further, one more bit of the swizzle is set.
  __device__ uint32_t place(uint32_t shared, int pass) const {
    return ((shared + offset_) ^ (pass * kAtOnce % 8 * kPieceBytes)) + pass * kAtOnce * kRowBytes;
  }

  int32_t row_, piece_;
  uint32_t offset_;
};

// Operand A from rows, K-major. Row r of the tile is row token[row_begin + r] of the source, or row
// row_begin + r without a token list. Rows past the expert's last and columns past the source's
// width are zeros.
template <class Shape, bool kGathers>
class SourceRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  struct Params {
    GatherSource from;
    int32_t padded_bytes;  // of a row, up to the end of its last k block
  };
  static constexpr bool kInOrder = !kGathers;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    Params params{.from = gather_source(source, rows), .padded_bytes = 0};
    if constexpr (!kGathers) params.from.token = nullptr;
    constexpr int32_t kBytes = Stage::kRowBytes;
    params.padded_bytes = (params.from.width_bytes + kBytes - 1) / kBytes * kBytes;
    return params;
  }

  __device__ SourceRows(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i) {
      const int32_t row = tile.row_begin + stage_.row() + i * Stage::kAtOnce;
      if (row >= tile.row_end || !stage_.has(i))
        source_row_[i] = kNone;
      else if (kGathers && params_.from.token != nullptr)
        source_row_[i] = static_cast<uint32_t>(params_.from.token[row]);
      else
        source_row_[i] = static_cast<uint32_t>(row);
    }
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t blocks_left) const {
    const int32_t in_row = params_.padded_bytes - blocks_left * Stage::kRowBytes + stage_.byte();
    const char* const first = static_cast<const char*>(params_.from.source) + in_row;
    const bool in_width = in_row < params_.from.width_bytes;
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i)
      stage_.copy(shared, i, first + static_cast<uint64_t>(source_row_[i]) * params_.from.row_bytes,
                  in_width && source_row_[i] != kNone);
  }
  __device__ void advance(int32_t /*blocks_left*/) {}

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_M>;
  static constexpr uint32_t kNone = 0xffffffff;

  const Params& params_;
  Stage stage_;
  uint32_t source_row_[Stage::kPasses];
};

// Operand A from rows that have one or two parts of columns, K-major; K runs over all parts: dH.
template <class Shape>
class PartRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;

  struct Params {
    const char* rows;
    int64_t row_bytes;
    int32_t blocks_a_part;
    int32_t padding;  // columns of a part's last k block that belong to the next part
  };

  // Of dH (capacity, parts * columns).
  static Params params(const tilemoe_tensor& dH, int64_t /*parts*/, int64_t columns) {
    const int32_t blocks = k_blocks_of_a_part<Shape>(columns);
    return {.rows = static_cast<const char*>(dH.data),
            .row_bytes = dH.stride[0] * int64_t{kElementBytes},
            .blocks_a_part = blocks,
            .padding = static_cast<int32_t>(int64_t{blocks} * Shape::BLOCK_K - columns)};
  }

  __device__ PartRows(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

  __device__ __forceinline__ void begin(const Tile& tile) {
    const int32_t row = tile.row_begin + stage_.row();
    from_ = params_.rows + row * params_.row_bytes + stage_.byte();
    rows_left_ = tile.row_end - row;
  }

  __device__ __forceinline__ void copy(uint32_t shared, int32_t blocks_left) const {
    const auto pass_bytes = static_cast<uint32_t>(params_.row_bytes) * Stage::kAtOnce;
    const bool in_width =
        blocks_left_of_part(blocks_left, params_.blocks_a_part) * Shape::BLOCK_K - params_.padding >
        stage_.piece() * kPieceColumns;
#pragma unroll
    for (int i = 0; i < Stage::kPasses; ++i)
      stage_.copy(shared, i, from_ + static_cast<uint64_t>(pass_bytes) * static_cast<uint32_t>(i),
                  in_width && rows_left_ > i * Stage::kAtOnce);
  }
  __device__ __forceinline__ void advance(int32_t blocks_left) {
    const bool next_part = blocks_left == params_.blocks_a_part + 1;
    from_ += Stage::kRowBytes - (next_part ? params_.padding * kElementBytes : 0);
  }

 private:
  using Stage = StageRows<Shape::kThreads, Shape::BLOCK_M>;
  static constexpr int kElementBytes = sizeof(typename Shape::Element);
  static constexpr int kPieceColumns = Stage::kPieceBytes / kElementBytes;

  const Params& params_;
  Stage stage_;
  const char* from_;   // this thread's piece of the next k block, in its first row
  int32_t rows_left_;  // from that row on
};

// The operands of the weight gradients, whose K is an expert's rows: a stage is BLOCK_K rows by the
// operand's block of columns, as chunks of 64 columns. Rows past the expert's last are zeros in
// both operands, since 0 times their memory's contents may be NaN.

// Operand A from gathered rows, MN-major: row r of K is row token[r] of the source, or row r
// without a token list. The tokens are read one k block ahead. Columns past the source's width are
// zeros.
template <class Shape>
class GatheredRowsAsK {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_M>;
  using Params = GatherSource;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    return gather_source(source, rows);
  }

  __device__ GatheredRowsAsK(const Params& params, int32_t thread)
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

// Operand B from rows grouped by expert, MN-major, of one or two parts of columns.
template <class Shape>
class DenseRowsAsK {
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

  __device__ DenseRowsAsK(const Params& params, int32_t thread) : params_(params), stage_(thread) {}

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
  const char* from_;  // this thread's piece of the next k block, in its first row
  int32_t rows_left_, columns_left_;
};

}  // namespace tilemoe::cuda::sm80
