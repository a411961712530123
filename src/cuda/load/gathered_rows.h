// Operand A from rows that lie anywhere: row r of the tile is row token[row_begin + r] of the
// source, or row row_begin + r itself where there is no token list. Copied by all threads of the
// producer, 16 bytes at a time; eight neighbouring threads read one row's 128 bytes. Rows past the
// expert's last and columns past the source's width are zeros.
#pragma once

#include <cstdint>

#include "cuda/core/gather_source.h"
#include "cuda/core/operand.h"
#include "cuda/core/tile.h"
#include "cuda/load/loader.h"
#include "cuda/ptx/cp_async.h"

namespace tilemoe::cuda::load {

template <class Shape>
class GatheredRows {
 public:
  using Operand = StagedOperand<Major::kK, Shape::BLOCK_M>;
  static constexpr int kTmaBytes = 0;
  static constexpr int kThreadArrivals = kProducerThreads;

  using Params = GatherSource;

  static Params params(const tilemoe_tensor& source, const Rows& rows) {
    return gather_source(source, rows);
  }

  __device__ GatheredRows(const Params& params, int32_t thread)
      : params_(params),
        row_(thread / kChunks),
        chunk_(thread % kChunks),
        shared_offset_(row_ * Operand::kRowBytes + swizzled_chunk(row_, chunk_)) {}

  __device__ void prefetch() const {}

  __device__ void begin(const Tile& tile) {
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t row = tile.row_begin + static_cast<int32_t>(row_) + i * kRowsAtOnce;
      source_row_[i] = row >= tile.row_end
                           ? kNone
                           : static_cast<uint32_t>(params_.token ? params_.token[row] : row);
    }
  }

  // A row that does not exist is not read. A prototype that read the expert's last row in its place
  // took 5 % longer than the copies it was to replace on 7b-n1024 and 28 % longer on qwen3-235b
  // (H100); one that did not was 5 % faster on the former. Why was not measured.
  __device__ void copy(uint32_t shared, int32_t k_block) const {
    const int32_t column =
        k_block * Operand::kRowBytes + static_cast<int32_t>(chunk_) * 16;  // in bytes
    const bool inside = column < params_.width_bytes;
    const char* first = static_cast<const char*>(params_.source) + column;
#pragma unroll
    for (int i = 0; i < kPasses; ++i)
      ptx::cp_async_16(shared + shared_offset_ + i * kRowsAtOnce * Operand::kRowBytes,
                       first + static_cast<uint64_t>(source_row_[i]) * params_.row_bytes,
                       inside && source_row_[i] != kNone ? 16 : 0);
  }

 private:
  static constexpr int kChunks = Operand::kRowBytes / 16;
  static constexpr int kRowsAtOnce = kProducerThreads / kChunks;
  static constexpr int kPasses = Shape::BLOCK_M / kRowsAtOnce;
  static constexpr uint32_t kNone = 0xffffffff;
  static_assert(kRowsAtOnce % 8 == 0, "a thread's rows all have the same place in their atom");

  const Params& params_;
  uint32_t row_, chunk_, shared_offset_;
  uint32_t source_row_[kPasses];  // half the registers of pointers: the producer has 40
};

}  // namespace tilemoe::cuda::load
