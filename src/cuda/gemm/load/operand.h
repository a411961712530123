// An operand's tile of one k block in shared memory, as loaders write it and products read it: rows
// of 128 bytes in swizzled atoms of 1024 bytes. TMA writes them so and wgmma reads them so; threads
// copy to them, and ldmatrix reads them, without bank conflicts.
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "cuda/core/variant.h"

namespace tilemoe::cuda {

// K-major: (kRows, 64). MN-major: chunks of 64 rows, each (64 steps of the sum, 64 rows).
template <Major kMajor_, int kRows_>
struct StagedOperand {
  static constexpr Major kMajor = kMajor_;
  static constexpr int kRows = kRows_;
  static constexpr int kRowBytes = 128;
  static constexpr int kBytes = kRows * kRowBytes;
  static constexpr int kChunkBytes = 64 * kRowBytes;
  static constexpr int kAtomBytes = 8 * kRowBytes;
  static_assert(kRows % (kMajor == Major::kK ? 8 : 64) == 0, "parts begin at whole atoms");

  // Bytes from the operand of one MMA, `mma_k` elements of K, to that of the next.
  static constexpr int step_bytes(int mma_k, int element_bytes) {
    return mma_k * (kMajor == Major::kK ? element_bytes : kRowBytes);
  }
};

// Where the 16-byte chunk `chunk` of row `row` lies in its atom.
TILEMOE_HOST_DEVICE uint32_t swizzled_chunk(uint32_t row, uint32_t chunk) {
  return (chunk ^ (row & 7)) * 16;
}

}  // namespace tilemoe::cuda
