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
  struct Params {
    GatherSource from;
    int32_t padded_bytes;  // of a row, to the end of its last k block
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

// Rows of parts of columns, summed over all of them: dH.
template <class Shape>
class PartRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;

  struct Params {
    const char* rows;
    int64_t row_bytes;
    int32_t blocks_a_part;
    int32_t padding;  // columns of a part's last k block that are the next part's
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
  const char* from_;   // this thread's piece of the next k block, of its first row
  int32_t rows_left_;  // from that row on
};

}  // namespace tilemoe::cuda::sm80
