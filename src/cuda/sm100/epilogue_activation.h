// The up-projection's end (epilogue/slab_activation.h), batch by batch.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/slab_activation.h"
#include "cuda/sm100/each_batch.h"

namespace tilemoe::cuda::sm100 {

// A tile's columns are kParts parts of equal width, and so are a batch's: gate, then up of the same
// columns of A.
template <class Shape, Activations kActivations, bool kAdjacent, SlabStore Rows>
class ActivationEpilogue {
 public:
  using Slab = SlabActivation<Shape, kActivations, kAdjacent, Rows>;
  static constexpr int kParts = Slab::kParts;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of a part

  struct Params {
    typename Slab::Params slab;
    int32_t columns;  // of a part
  };
  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return {.slab = Slab::params(H, A, biases, experts),
            .columns = static_cast<int32_t>(kAdjacent ? 2 * experts.n : experts.n)};
  }

  __device__ explicit ActivationEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    constexpr int kPart = kBatchColumns / kParts;
    const Slab slab(params_.slab);
    const int32_t first = tile.n_block * kColumns;
    for_each_batch<Shape, kColumns, kPart>(
        tile, first, params_.columns, [&](int m, int32_t column) {
          Batch H;
#pragma unroll
          for (int part = 0; part < kParts; ++part)
            D.pull<kPart>(m, part * kColumns + column - first, &H[0][part * kPart / 2]);
          D.land(H);
          slab.finish(m, tile, column, H);
        });
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm100
