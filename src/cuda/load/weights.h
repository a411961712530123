// Operand B: BLOCK_N columns of the product, which are rows of one expert's weights, by the copy
// engine. Of a gated activation the tile has two parts, gate rows and then as many up rows, each
// from a map of its own: so gate and up of a column meet in one thread's accumulators, whether they
// lie one after the other, interleaved or in two tensors, and neither spills into the other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/gemm/operand.h"
#include "cuda/gemm/tile.h"
#include "cuda/ptx/tma.h"

namespace tilemoe::cuda {

template <class Shape, Major kMajor, int kParts>
class Weights {
 public:
  using Operand = cuda::Operand<kMajor, Shape::BLOCK_N>;
  static constexpr int kEngineBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;
  static constexpr int kPartRows = Shape::BLOCK_N / kParts;
  using Part = cuda::Operand<kMajor, kPartRows>;

  struct Params {
    // Contiguous along the sum: (E, rows, sum), boxes of (1, kPartRows, BLOCK_K).
    // Contiguous along rows: (E, sum, rows), boxes of (1, BLOCK_K, 64).
    CUtensorMap part[kParts];
  };

  __device__ Weights(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    expert_ = tile.expert;
    first_row_ = tile.n_block * kPartRows;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    const int32_t sum = k_block * Shape::BLOCK_K;
#pragma unroll
    for (int p = 0; p < kParts; ++p) {
      const uint32_t part = shared + p * Part::kBytes;
      if constexpr (kMajor == Major::kSum) {
        ptx::tma_load(part, &params_.part[p], full, sum, first_row_, expert_);
      } else {
#pragma unroll
        for (int chunk = 0; chunk < kPartRows / 64; ++chunk)
          ptx::tma_load(part + chunk * Part::kChunkBytes, &params_.part[p], full,
                        first_row_ + chunk * 64, sum, expert_);
      }
    }
  }

 private:
  const Params& params_;
  int32_t expert_, first_row_;
};

}  // namespace tilemoe::cuda
