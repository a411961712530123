// The activation gradient's end (epilogue/slab_activation_gradient.h), slab by slab: a warp's
// columns are a group of ds.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/slab_activation_gradient.h"
#include "cuda/sm80/each_slab.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

template <class Shape, Activations kActivations>
class ActivationGradientEpilogue {
 public:
  using Slab = SlabActivationGradient<Shape, kActivations>;
  static constexpr int kColumns = Shape::BLOCK_N;
  static_assert(Shape::kWarpColumns == kDsColumns, "a warp has a group of ds");

  using Params = typename Slab::Params;
  static Params params(const ActivationGradient& step) { return Slab::params(step); }

  __device__ explicit ActivationGradientEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::slab_column() < params_.H.n &&
           tile.row_begin + Shape::slab_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::slab_column();
    if (column >= params_.H.n) return;
    with_activation<kActivations>(params_.activation, [&](const auto& f) {
      const Slab slab(params_);
      const typename Slab::H h(params_.H, tile);
      for_each_slab<Shape>(D, [&](int m, const OneSlab<Shape>& dA) {
        return slab.finish(f, h, m, tile, column, dA);
      });
    });
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm80
