// Loaders of operand A that gather rows by a token list with cp.async: rows of a projection
// (K-major) and the rows that a weight gradient sums over (MN-major).
#pragma once

#include <cuda.h>

#include <cstdint>

#include "core/check.h"
#include "core/step_arguments.h"
#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {

// Row r of an expert is row token[r] of the source, or row r itself if the token list is null.
struct GatherSource {
  const void* source;    // (T, width)
  uint32_t row_bytes;    // from one row to the next
  int32_t width_bytes;   // of a row
  const int32_t* token;  // (capacity) or null
};

// The rows of `source` that the routing names. The distance between rows fits in 32 bits of bytes,
// so that an address takes one multiplication.
inline GatherSource gather_source(const tilemoe_tensor& source, const Rows& rows) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(source.dtype));
  const int64_t bytes = source.shape[0] > 1 ? source.stride[0] * element : 0;
  TILEMOE_ASSERT(bytes >= 0 && bytes <= UINT32_MAX,  // cuda_backend.cpp
                 "rows of " << bytes << " bytes are too far apart to be gathered");
  return {.source = source.data,
          .row_bytes = static_cast<uint32_t>(bytes),
          .width_bytes = static_cast<int32_t>(source.shape[1] * element),
          .token = rows.token};
}

}  // namespace tilemoe::cuda

namespace tilemoe::cuda::load {

// Operand A, gathered: row r of the tile is row token[row_begin + r] of the source, or row
// row_begin + r if the token list is null. All threads of the producer copy 16 bytes at a time;
// eight neighbouring threads read the 128 bytes of one row. Rows past the expert's last row and
// columns past the source's width are zeros.
//
// What its two loaders have in common: which bytes of a stage a thread copies.
template <class Shape>
class GatheredRowsBase {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = 0;

  using Params = GatherSource;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    return gather_source(source, rows);
  }

  __device__ void prefetch() const {}

 protected:
  static constexpr int kChunks = Operand::kRowBytes / 16;
  static constexpr int kRowsAtOnce = kProducerThreads / kChunks;
  static constexpr int kPasses = Shape::BLOCK_M / kRowsAtOnce;
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows all have the same place in their atom");

  __device__ GatheredRowsBase(const Params& params, int32_t thread)
      : params_(params),
        row_(thread / kChunks),
        chunk_(thread % kChunks),
        shared_offset_(row_ * Operand::kRowBytes + swizzled_chunk(row_, chunk_)) {}

  // Whether the tile has no rows past the expert's last.
  __device__ static bool is_whole(const Tile& tile) {
    return tile.row_begin + Shape::BLOCK_M <= tile.row_end;
  }
  // This thread's 16 bytes of row 0.
  __device__ const char* first() const {
    return static_cast<const char*>(params_.source) + chunk_ * 16;
  }
  // Whether the source has this thread's columns of the k block.
  __device__ bool has_columns(int32_t k_block) const {
    return k_block * Operand::kRowBytes + chunk_ * 16 < params_.width_bytes;
  }

  // from(i), bytes_of(i): the source of this thread's row i, and 16, or 0 for zeros.
  template <class From, class BytesOf>
  __device__ __forceinline__ void copy_rows(uint32_t shared, const From& from,
                                            const BytesOf& bytes_of) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      ptx::cp_async_16(shared + shared_offset_ + i * kRowsAtOnce * Operand::kRowBytes, from(i),
                       bytes_of(i));
  }

  const Params& params_;
  int32_t row_, chunk_;

 private:
  uint32_t shared_offset_;
};

// Keeps a pointer per row.
template <class Shape>
class GatheredRows : public GatheredRowsBase<Shape> {
  using Base = GatheredRowsBase<Shape>;
  using Base::copy_rows, Base::kPasses, Base::kRowsAtOnce, Base::params_, Base::row_;

 public:
  using typename Base::Operand;

  __device__ GatheredRows(const GatherSource& params, int32_t thread) : Base(params, thread) {}

  // Rows past the expert's last row are not read. A prototype that read the last row instead was 5
  // % slower than the copies it replaced on 7b-n1024 and 28 % slower on qwen3-235b (H100); without
  // these reads it was 5 % faster on 7b-n1024. The cause was not measured.
  __device__ void begin(const Tile& tile) {
    rows_left_ = tile.row_end - tile.row_begin - row_;
    whole_blocks_ = Base::is_whole(tile) ? params_.width_bytes / Operand::kRowBytes : 0;
    const char* source = Base::first();
    // The last row stands for those past it, so that no load is conditional.
    const auto point_to = [&](auto source_row) {
#pragma unroll
      for (int i = 0; i < kPasses; ++i) {
        const int32_t row = min(tile.row_begin + row_ + i * kRowsAtOnce, tile.row_end - 1);
        from_[i] = source + static_cast<uint64_t>(source_row(row)) * params_.row_bytes;
      }
    };
    if (params_.token != nullptr)
      point_to([&](int32_t row) { return static_cast<uint32_t>(params_.token[row]); });
    else
      point_to([](int32_t row) { return static_cast<uint32_t>(row); });
  }

  __device__ int32_t whole_blocks() const {
    return whole_blocks_;
  }

  __device__ void copy_whole(uint32_t shared, int32_t /*k_block*/) const {
    copy_rows(shared, place(), [](int) { return 16; });
  }
  __device__ void copy(uint32_t shared, int32_t k_block) const {
    const bool inside = Base::has_columns(k_block);
    copy_rows(shared, place(),
              [&](int i) { return inside && i * kRowsAtOnce < rows_left_ ? 16 : 0; });
  }
  __device__ void advance(int32_t /*k_block*/) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) from_[i] += Operand::kRowBytes;
  }

 private:
  __device__ auto place() const {
    return [this](int i) { return from_[i]; };
  }

  int32_t rows_left_;  // of the expert, from this thread's first one
  int32_t whole_blocks_;
  const char* from_[kPasses];  // this thread's 16 bytes of each row, in the next k block
};

// Operand A of a weight gradient, whose K dimension is an expert's rows: step r of the sum is row
// token[r] of the source, or row r if the token list is null. A stage holds BLOCK_K rows by the
// tile's columns, in chunks of 64 columns. All threads of the producer copy 16 bytes at a time;
// eight neighbouring threads read the 128 bytes of one row. Rows past the expert's last row are
// zeros in both operands, because 0 times an unknown number may be NaN; columns past the source's
// width are zeros too.
//
// The number of producer instructions limits these kernels. Therefore a lane looks up one row for
// its whole warp, two k blocks ahead, and all else that a copy needs is computed once per tile.
template <class Shape>
class GatheredRowsAsK {
 public:
  using Operand = StagedOperand<Major::kMN, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = 0;

  using Params = GatherSource;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    return gather_source(source, rows);
  }

  __device__ GatheredRowsAsK(const Params& params, int32_t thread)
      : params_(params),
        row_(thread / kPieces),
        shared_offset_(row_ * Operand::kRowBytes + swizzled_chunk(row_, thread % kPieces)) {}

  __device__ void prefetch() const {}

  __device__ void begin(const Tile& tile) {
    next_row_ = tile.row_begin + looked_up_row();
    row_end_ = tile.row_end;
    const int32_t column = tile.m_block * kChunks * Operand::kRowBytes;  // in bytes
    first_ = static_cast<const char*>(params_.source) + column + threadIdx.x % kPieces * 16;
    whole_blocks_ = column + kChunks * Operand::kRowBytes <= params_.width_bytes
                        ? (tile.row_end - tile.row_begin) / Shape::BLOCK_K
                        : 0;
    soon_ = look_up();
    later_ = look_up();
    find_rows();
  }

  __device__ int32_t whole_blocks() const { return whole_blocks_; }

  __device__ void copy_whole(uint32_t shared, int32_t /*k_block*/) const {
    copy_rows(shared, [](int, int) { return 16; });
  }
  __device__ void copy(uint32_t shared, int32_t /*k_block*/) const {
    const int32_t first_row = next_row_ - looked_up_row() - kAhead * Shape::BLOCK_K;
    const int32_t rows_left = row_end_ - first_row - row_;  // from this thread's first one
    const auto column = static_cast<int32_t>(first_ - static_cast<const char*>(params_.source));
    copy_rows(shared, [&](int i, int chunk) {
      const bool inside = column + chunk * Operand::kRowBytes < params_.width_bytes;
      return inside && i * kRowsAtOnce < rows_left ? 16 : 0;
    });
  }
  // All lanes of a warp call it.
  __device__ void advance(int32_t /*k_block*/) { find_rows(); }

 private:
  static constexpr int kPieces = Operand::kRowBytes / 16;
  static constexpr int kChunks = Operand::kRows / 64;
  static constexpr int kRowsAtOnce = kProducerThreads / kPieces;
  static constexpr int kRowsAPass = kWarp / kPieces;  // of a warp
  static constexpr int kPasses = Shape::BLOCK_K / kRowsAtOnce;
  static constexpr int kWarpRows = kPasses * kRowsAPass;  // of a k block
  static constexpr int kAhead = 3;  // k blocks from the next copy to the next look-up
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows all have the same place in their atom");
  static_assert(kWarp % kWarpRows == 0, "a lane looks up one row");

  // The row of a k block that this lane looks up.
  __device__ static int32_t looked_up_row() {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t pass = thread % kWarpRows / kRowsAPass, row = thread % kRowsAPass;
    return pass * kRowsAtOnce + thread / kWarp * kRowsAPass + row;
  }
  // Any row stands for one past the last.
  __device__ int32_t look_up() {
    const int32_t row = next_row_;
    next_row_ += Shape::BLOCK_K;
    if (row >= row_end_) return 0;
    return params_.token ? params_.token[row] : row;
  }

  __device__ __forceinline__ void find_rows() {
    const int32_t now = soon_;
    soon_ = later_;
    later_ = look_up();
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t row = __shfl_sync(kAllLanes, now, i * kRowsAPass + row_ % kRowsAPass);
      from_[i] = first_ + static_cast<uint64_t>(static_cast<uint32_t>(row)) * params_.row_bytes;
    }
  }

  template <class BytesOf>
  __device__ __forceinline__ void copy_rows(uint32_t shared, const BytesOf& bytes_of) const {
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk)
        ptx::cp_async_16(shared + shared_offset_ + chunk * Operand::kChunkBytes +
                             i * kRowsAtOnce * Operand::kRowBytes,
                         from_[i] + chunk * Operand::kRowBytes, bytes_of(i, chunk));
  }

  const Params& params_;
  int32_t row_;
  uint32_t shared_offset_;
  const char* first_;  // of this thread's columns, in row 0
  int32_t whole_blocks_;
  int32_t next_row_, row_end_;
  int32_t soon_, later_;       // source rows of the k blocks after the next one
  const char* from_[kPasses];  // this thread's columns of its rows of the next k block
};

}  // namespace tilemoe::cuda::load
