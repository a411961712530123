// A weight gradient's end (epilogue/slab_weight_gradient.h), columns by columns. Of a tile that is
// one part of a sum, D is left for later.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/slab_weight_gradient.h"
#include "cuda/sm100/partial_sums.h"
#include "cuda/sm100/warp_accumulators.h"

namespace tilemoe::cuda::sm100 {

template <class Shape, class Out, OutputMajor kMajor>
class WeightGradientEpilogue {
 public:
  using Slabs = SlabWeightGradient<Shape, Out, kMajor>;

  struct Params {
    typename Slabs::Params gradient;
    PartialSums<Shape> partial_sums;
  };

  static Params params(const WeightGradient& step, void* partial_sums) {
    return {.gradient = Slabs::params(step), .partial_sums = {static_cast<float4*>(partial_sums)}};
  }

  __device__ explicit WeightGradientEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    if (Slabs(params_.gradient).leaves(tile)) return;
#pragma unroll 1
    for (int32_t column = 0; column < Shape::BLOCK_N; column += kBatchColumns) {
      Columns<Shape> columns;
#pragma unroll
      for (int m = 0; m < Shape::kSlabs; ++m) D.pull<kBatchColumns>(m, column, columns[m]);
      D.land(columns);
      if (tile.partial_sum >= 0)
        params_.partial_sums.write(tile.partial_sum, column / kBatchColumns, columns);
      else
        store_columns(columns, tile, column);
    }
  }

  // A batch of columns of all of the warp's slabs, the tile's from `column` on.
  __device__ __forceinline__ void store_columns(Columns<Shape>& D, const Tile& tile,
                                                int32_t column) const {
    const Slabs slabs(params_.gradient);
    slabs.store(D, slabs.place_of(tile, column));
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm100
