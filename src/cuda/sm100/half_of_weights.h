// Operand B of a pair of blocks: each brings half of the tile's columns, which a product reads from
// both blocks' stages. The first block has the first half; of a tile in two parts, gate and then up
// columns, that is the gate part.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "up_parts.h"

namespace tilemoe::cuda::sm100 {

// `Load_` brings as many columns as one block's, of one part.
template <class Load_, int kParts>
class HalfOfWeights {
 public:
  using Load = Load_;
  using Operand = typename Load::Operand;
  static constexpr int kTmaBytes = Load::kTmaBytes;
  static constexpr int kThreadArrivals = Load::kThreadArrivals;

  struct Params {
    typename Load::Params part[kParts];
  };

  // Of kParts weights (E, columns of the product, sum).
  static Params params(const tilemoe_tensor* weights) {
    Params params{};
    for (int p = 0; p < kParts; ++p) params.part[p] = Load::params(weights + p);
    return params;
  }
  // Of W1's parts (E, columns, d), which are summed over.
  static Params params(const UpParts& W1) {
    static_assert(kParts == 1);
    return {{Load::params(W1)}};
  }

  __device__ HalfOfWeights(const Params& params, int32_t thread)
      : load_(params.part[kParts == 2 ? rank() : 0], thread) {}

  __device__ void prefetch() const { load_.prefetch(); }
  __device__ void begin(Tile tile) {
    if constexpr (kParts == 1) tile.n_block = 2 * tile.n_block + rank();
    load_.begin(tile);
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    load_.load(shared, full, k_block);
  }

 private:
  __device__ static int32_t rank() { return static_cast<int32_t>(blockIdx.x % 2); }

  Load load_;
};

}  // namespace tilemoe::cuda::sm100
