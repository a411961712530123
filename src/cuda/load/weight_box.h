// Neighbouring rows of one expert's weights, as the copy engine brings them for operand B: to this
// block, or to every block of the cluster.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/gemm/operand.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda {

template <class Shape, Major kMajor, int kRows_>
struct WeightBox {
  static constexpr int kRows = kRows_;
  using Operand = cuda::Operand<kMajor, kRows>;

  // Contiguous along the sum: map (E, rows, sum), boxes of (1, kRows, BLOCK_K).
  // Contiguous along rows: map (E, sum, rows), boxes of (1, BLOCK_K, 64).
  template <bool kMulticast>
  __device__ static void load(uint32_t shared, const CUtensorMap* map, uint32_t full,
                              int32_t first_row, int32_t sum, int32_t expert) {
    constexpr uint16_t kAllBlocks = (1 << Shape::kCluster) - 1;
    const auto box = [&](uint32_t to, int32_t x, int32_t y) {
      if constexpr (kMulticast)
        ptx::tma_load_multicast(to, map, full, kAllBlocks, x, y, expert);
      else
        ptx::tma_load(to, map, full, x, y, expert);
    };
    if constexpr (kMajor == Major::kSum) {
      box(shared, sum, first_row);
    } else {
#pragma unroll
      for (int chunk = 0; chunk < kRows / 64; ++chunk)
        box(shared + chunk * Operand::kChunkBytes, first_row + chunk * 64, sum);
    }
  }
};

}  // namespace tilemoe::cuda
