// Operands of a product that sums over an expert's rows. A stage is BLOCK_K rows of the expert by
// the operand's block of columns, as chunks of 64 columns; rows past the expert's last are zeros in
// both operands, since 0 times what lies there may be NaN.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/gemm/operand.h"
#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/tma.h"
#include "cuda/tensor_map.h"

namespace tilemoe::cuda {

// Which operand of the product a loader brings: the one along its rows, or along its columns.
enum class Side { kA, kB };

template <class Shape, Side kSide>
inline constexpr int kBlockOf = kSide == Side::kA ? Shape::BLOCK_M : Shape::BLOCK_N;

template <Side kSide>
__device__ __forceinline__ int32_t block_of(const Tile& tile) {
  return kSide == Side::kA ? tile.m_block : tile.n_block;
}

// Rows that lie anywhere: row r of the sum is row token[r] of the source, or row r itself where
// there is no token list. Copied by all threads of the producer, 16 bytes at a time; eight
// neighbouring threads read one row's 128 bytes. Columns past the source's width are zeros too.
template <class Shape, Side kSide>
class GatheredSummedRows {
 public:
  using Operand = cuda::Operand<Major::kRows, kBlockOf<Shape, kSide>>;
  static constexpr int kEngineBytes = 0;
  static constexpr int kThreadArrivals = kWarpgroup;

  struct Params {
    const void* source;    // (T, width)
    int64_t row_bytes;     // from one row to the next
    int32_t width_bytes;   // of a row
    const int32_t* token;  // (capacity) or null
  };

  __device__ GatheredSummedRows(const Params& params, int32_t thread)
      : params_(params),
        row_(thread / kPieces),
        piece_(thread % kPieces),
        shared_offset_(row_ * Operand::kRowBytes + swizzled_chunk(row_, piece_)) {}

  __device__ void prefetch() const {}

  __device__ void begin(const Tile& tile) {
    next_row_ = tile.row_begin + static_cast<int32_t>(row_);
    row_end_ = tile.row_end;
    column_ =
        block_of<kSide>(tile) * kChunks * Operand::kRowBytes + static_cast<int32_t>(piece_) * 16;
    find_rows();
  }

  __device__ void copy(uint32_t shared, int32_t /*k_block*/) {
    const char* first = static_cast<const char*>(params_.source) + column_;
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const bool exists = source_row_[i] != kNone;
      const char* row = first + (exists ? source_row_[i] * params_.row_bytes : 0);
#pragma unroll
      for (int chunk = 0; chunk < kChunks; ++chunk) {
        const bool inside = column_ + chunk * Operand::kRowBytes < params_.width_bytes;
        ptx::cp_async_16(shared + shared_offset_ + chunk * Operand::kChunkBytes +
                             i * kRowsAtOnce * Operand::kRowBytes,
                         inside ? row + chunk * Operand::kRowBytes : params_.source,
                         exists && inside ? 16 : 0);
      }
    }
    find_rows();  // the next k block's, while this one's copies are under way
  }

 private:
  static constexpr int kPieces = Operand::kRowBytes / 16;
  static constexpr int kChunks = Operand::kRows / 64;
  static constexpr int kRowsAtOnce = kWarpgroup / kPieces;
  static constexpr int kPasses = Shape::BLOCK_K / kRowsAtOnce;
  static constexpr int32_t kNone = -1;
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows all have the same place in their atom");

  __device__ void find_rows() {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t row = next_row_ + i * kRowsAtOnce;
      source_row_[i] = row >= row_end_ ? kNone : params_.token ? params_.token[row] : row;
    }
    next_row_ += Shape::BLOCK_K;
  }

  const Params& params_;
  uint32_t row_, piece_, shared_offset_;
  int32_t next_row_, row_end_;
  int32_t column_;  // in bytes
  int32_t source_row_[kPasses];
};

// Rows grouped by expert, of one or two parts of columns, by the copy engine.
template <class Shape, Side kSide>
class DenseSummedRows {
 public:
  using Operand = cuda::Operand<Major::kRows, kBlockOf<Shape, kSide>>;
  static constexpr int kEngineBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;

  struct Params {
    CUtensorMap part[2];  // (capacity, n) each, ragged, boxes of (BLOCK_K, 64)
    int32_t blocks_a_part;
  };

  __device__ DenseSummedRows(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    const int32_t block = block_of<kSide>(tile);
    part_ = block >= params_.blocks_a_part ? 1 : 0;
    column_ = (block - part_ * params_.blocks_a_part) * Operand::kRows;
    row_begin_ = tile.row_begin;
    row_end_ = tile.row_end;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const int32_t row = row_begin_ + k_block * Shape::BLOCK_K;
#pragma unroll
    for (int chunk = 0; chunk < Operand::kRows / 64; ++chunk)
      ptx::tma_load(shared + chunk * Operand::kChunkBytes, &params_.part[part_], full,
                    column_ + chunk * 64, kRaggedRows - row_end_ + row, row_end_, kRaggedRows);
  }

 private:
  const Params& params_;
  int32_t part_, column_, row_begin_, row_end_;
};

}  // namespace tilemoe::cuda
