// A weight gradient's end (epilogue/slab_weight_gradient.h). Of a tile that is one part of a sum, D
// is left for later.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/slab_weight_gradient.h"
#include "cuda/sm80/partial_sums.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

template <class Shape, class Out, OutputMajor kMajor>
class WeightGradientEpilogue {
 public:
  template <class Other>
  using Of = WeightGradientEpilogue<Other, Out, kMajor>;  // the same of another shape
  using Slabs = SlabWeightGradient<Shape, Out, kMajor>;

  struct Params {
    typename Slabs::Params gradient;
    PartialSums<Shape> partial_sums;
  };

  // Partial sums have tiles as the product has: an epilogue of another shape writes none.
  static Params params(const WeightGradient& step, void* partial_sums) {
    return {.gradient = Slabs::params(step), .partial_sums = {static_cast<float4*>(partial_sums)}};
  }

  __device__ explicit WeightGradientEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    const Slabs slabs(params_.gradient);
    const GradientPlace place = slabs.place_of(tile, Shape::slab_column());
    return place.row + Shape::slab_row(0) < params_.gradient.size.rows &&
           place.column < params_.gradient.size.columns && !slabs.leaves(tile);
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const Slabs slabs(params_.gradient);
    const GradientPlace place = slabs.place_of(tile, Shape::slab_column());
    if (slabs.leaves(tile)) return;
    if (tile.partial_sum >= 0) return params_.partial_sums.write(tile.partial_sum, D);
    slabs.store(D, place);
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm80
