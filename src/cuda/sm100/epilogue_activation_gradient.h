// The activation gradient's end (epilogue/slab_activation_gradient.h), batch by batch: a batch is a
// group of ds.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/slab_activation_gradient.h"
#include "cuda/sm100/each_batch.h"

namespace tilemoe::cuda::sm100 {

template <class Shape, Activations kActivations>
class ActivationGradientEpilogue {
 public:
  using Slab = SlabActivationGradient<Shape, kActivations>;
  static constexpr int kColumns = Shape::BLOCK_N;
  static_assert(kBatchColumns == kDsColumns);

  using Params = typename Slab::Params;
  static Params params(const ActivationGradient& step) { return Slab::params(step); }

  __device__ explicit ActivationGradientEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    const int32_t first = tile.n_block * kColumns;
    with_activation<kActivations>(params_.activation, [&](const auto& f) {
      const Slab slab(params_);
      const typename Slab::H h(params_.H, tile);
      for_each_batch<Shape>(tile, first, params_.H.n, [&](int m, int32_t column) {
        Batch dA;
        D.read(m, column - first, dA);
        slab.finish(f, h, m, tile, column, dA);
      });
    });
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm100
