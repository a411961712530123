// Which part of a stage a thread copies: rows of 128 bytes, 16 bytes at a time, eight neighbouring
// threads a row.
#pragma once

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/ptx/cp_async.h"

namespace tilemoe::cuda::sm80 {

// Of kRows rows that all kThreads threads copy in passes.
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

  __device__ int32_t row() const { return row_; }  // in the first pass; kAtOnce more in each other
  __device__ int32_t piece() const { return piece_; }
  __device__ int32_t byte() const { return piece_ * kPieceBytes; }

  // Whether the thread has a row in a pass: known where they fit.
  __device__ bool has(int pass) const {
    return (pass + 1) * kAtOnce <= kRows || row_ + pass * kAtOnce < kRows;
  }
  // To the piece of that pass; zeros where the source is not valid.
  __device__ __forceinline__ void copy(uint32_t shared, int pass, const char* source,
                                       bool valid) const {
    if (has(pass)) ptx::cp_async_16(place(shared, pass), source, valid ? 16 : 0);
  }

 private:
  // Half an atom further, the swizzle has another bit.
  __device__ uint32_t place(uint32_t shared, int pass) const {
    return ((shared + offset_) ^ (pass * kAtOnce % 8 * kPieceBytes)) + pass * kAtOnce * kRowBytes;
  }

  int32_t row_, piece_;
  uint32_t offset_;
};

}  // namespace tilemoe::cuda::sm80
