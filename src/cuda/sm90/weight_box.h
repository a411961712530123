// Neighbouring rows of one expert's weights, as TMA brings them for operand B.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/sm90/operand.h"

namespace tilemoe::cuda {

template <Major kMajor, int kRows_>
struct WeightBox {
  static constexpr int kRows = kRows_;
  using Operand = cuda::Operand<kMajor, kRows>;

  // Contiguous along the sum: map (E, rows, sum), boxes of (1, kRows, BLOCK_K).
  // Contiguous along rows: map (E, sum, rows), boxes of (1, BLOCK_K, 64).
  template <class Copy>
  __device__ static void load(Copy copy, uint32_t shared, const CUtensorMap* map, uint32_t full,
                              int32_t first_row, int32_t sum, int32_t expert) {
    if constexpr (kMajor == Major::kK) {
      copy.load(shared, map, full, sum, first_row, expert);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kRows / 64; ++chunk)
        copy.load(shared + chunk * Operand::kChunkBytes, map, full, first_row + chunk * 64, sum,
                  expert);
    }
  }
};

}  // namespace tilemoe::cuda
