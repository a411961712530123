// Loaders of operand A by threads in a kernel with two sources: gathered rows of the first one, and
// rows of the second one, which are in order.
#pragma once

#include <cstdint>

#include "core/check.h"
#include "core/step_arguments.h"
#include "cuda/gemm/load/gathered.h"
#include "cuda/gemm/schedule/tile.h"

namespace tilemoe::cuda::load {

// As GatheredRows, where registers are too few for pointers: of a row it keeps the number, half of a
// pointer, and each copy computes the pointer.
template <class Shape>
class GatheredRowsOfTwo : public GatheredRowsBase<Shape> {
  using Base = GatheredRowsBase<Shape>;
  using Base::copy_rows, Base::kPasses, Base::kRowsAtOnce, Base::params_, Base::row_;

 public:
  using typename Base::Operand;

  __device__ GatheredRowsOfTwo(const GatherSource& params, int32_t thread) : Base(params, thread) {}

  __device__ void begin(const Tile& tile) {
    from_ = Base::first();
    is_whole_ = Base::is_whole(tile);
#pragma unroll
    for (int i = 0; i < kPasses; ++i) {
      const int32_t row = tile.row_begin + row_ + i * kRowsAtOnce;
      source_row_[i] = row >= tile.row_end
                           ? kNone
                           : static_cast<uint32_t>(params_.token ? params_.token[row] : row);
    }
  }

  __device__ int32_t whole_blocks() const {
    return 0;
  }
  __device__ void copy_whole(uint32_t shared, int32_t k_block) {
    copy(shared, k_block);
  }
  // Most tiles are whole, and need no predicates.
  __device__ void copy(uint32_t shared, int32_t k_block) {
    const char* from = from_;
    from_ += Operand::kRowBytes;
    const auto place = [&](int i) {
      return from + static_cast<uint64_t>(source_row_[i]) * params_.row_bytes;
    };
    if (is_whole_ && (k_block + 1) * Operand::kRowBytes <= params_.width_bytes) {
      copy_rows(shared, place, [](int) { return 16; });
    } else {
      const bool inside = Base::has_columns(k_block);
      copy_rows(shared, place, [&](int i) { return inside && source_row_[i] != kNone ? 16 : 0; });
    }
  }
  __device__ void advance(int32_t /*k_block*/) {}

 private:
  static constexpr uint32_t kNone = 0xffffffff;

  const char* from_;              // this thread's 16 bytes of row 0, in the next k block
  bool is_whole_;                 // the tile has no rows past the expert's last
  uint32_t source_row_[kPasses];  // half the registers of pointers: the producer has 40
};

// Rows of the second source: row row_begin + r of the source is row r of the tile, so one pointer is
// enough.
template <class Shape>
class CopiedRows : public GatheredRowsBase<Shape> {
  using Base = GatheredRowsBase<Shape>;
  using Base::copy_rows, Base::kRowsAtOnce, Base::params_, Base::row_;

 public:
  using typename Base::Operand;

  static GatherSource params(const tilemoe_tensor& source, const Rows& rows) {
    TILEMOE_ASSERT(rows.token == nullptr, "copied rows are in order");
    return gather_source(source, rows);
  }

  __device__ CopiedRows(const GatherSource& params, int32_t thread) : Base(params, thread) {}

  __device__ void begin(const Tile& tile) {
    from_ = Base::first() + static_cast<uint64_t>(tile.row_begin + row_) * params_.row_bytes;
    rows_left_ = tile.row_end - tile.row_begin - row_;
  }

  __device__ int32_t whole_blocks() const { return 0; }
  __device__ void copy_whole(uint32_t shared, int32_t k_block) const { copy(shared, k_block); }
  __device__ void copy(uint32_t shared, int32_t k_block) const {
    const bool inside = Base::has_columns(k_block);
    const auto pass_bytes = static_cast<uint64_t>(kRowsAtOnce) * params_.row_bytes;
    copy_rows(
        shared, [&](int i) { return from_ + i * pass_bytes; },
        [&](int i) { return inside && i * kRowsAtOnce < rows_left_ ? 16 : 0; });
  }
  __device__ void advance(int32_t /*k_block*/) { from_ += Operand::kRowBytes; }

 private:
  const char* from_;   // this thread's 16 bytes of its first row, in the next k block
  int32_t rows_left_;  // of the expert, from this thread's first one
};

}  // namespace tilemoe::cuda::load
