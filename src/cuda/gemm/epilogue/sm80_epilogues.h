// A tile's end, slab by slab, as a loop: written out for all of a warp's slabs it is some 90 KiB of
// instructions for a gated activation's gradient, which a multiprocessor fetches anew for each tile.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/epilogue/fragment_activation.h"
#include "cuda/gemm/epilogue/fragment_activation_gradient.h"
#include "cuda/gemm/epilogue/fragment_weight_gradient.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm80.h"
#include "cuda/gemm/sm80_split_k.h"

namespace tilemoe::cuda::sm80 {

// A warp's slab, as what works on several takes it.
template <class Shape>
using OneSlab = Slabs<1, Shape::kWarpColumns>;

// Calls body(m, slab m) of each; false ends it. The others move up by one, since registers have
// constant numbers, so D is lost.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_slab(Accumulators<Shape>& D, const Body& body) {
#pragma unroll 1
  for (int m = 0; m < Shape::kSlabs; ++m) {
    if (!body(m, reinterpret_cast<OneSlab<Shape>&>(D[0]))) return;
#pragma unroll
    for (int later = 1; later < Shape::kSlabs; ++later)
#pragma unroll
      for (int i = 0; i < Shape::kWarpColumns / 2; ++i) D[later - 1][i] = D[later][i];
  }
}

// The up-projection's end (epilogue/slab_activation.h), slab by slab.

// A warp's columns are the parts that a slab has.
template <class Shape, Activations kActivations, bool kAdjacent, SlabStore Rows>
class ActivationEpilogue {
 public:
  using Slab = SlabActivation<Shape, kActivations, kAdjacent, Rows>;
  static constexpr int kParts = Slab::kParts;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of a part

  using Params = typename Slab::Params;
  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return Slab::params(H, A, biases, experts);
  }

  __device__ explicit ActivationEpilogue(const Params& params) : slab_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::slab_column() / kParts < slab_.columns() &&
           tile.row_begin + Shape::slab_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::slab_column() / kParts;
    for_each_slab<Shape>(D, [&](int m, OneSlab<Shape>& slab) {
      if (tile.row_begin + Shape::slab_row(m) >= tile.row_end) return false;
      slab_.finish(m, tile, column, slab);
      return true;
    });
  }

 private:
  Slab slab_;
};

// The activation gradient's end (epilogue/slab_activation_gradient.h), slab by slab: a warp's
// columns are a group of ds.

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

// D + bias, rounded and stored.

template <class Shape, SlabStore Rows>
class StoreEpilogue {
 public:
  static constexpr int kColumns = Shape::BLOCK_N;

  struct Params {
    typename Rows::Output D;  // (capacity, 1, columns)
    Bias bias;
  };

  // Of `bias` (E, columns), which may be absent.
  static Params params(const tilemoe_tensor& D, const tilemoe_tensor& bias) {
    return {.D = Rows::output(D, 1, D.shape[1]), .bias = bias_of(bias)};
  }

  __device__ explicit StoreEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::slab_column() < params_.D.columns &&
           tile.row_begin + Shape::slab_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::slab_column();
    add_bias<typename Shape::Element, 0, Shape::kWarpColumns>(params_.bias, tile.expert, column, D);
    store_columns<Shape, Shape::kWarpColumns>(Rows(0, 0), params_.D, tile.row_begin, tile.row_end,
                                              0, column, [&](int m, int i) { return D[m][i]; });
  }

 private:
  const Params& params_;
};

// A weight gradient's end (epilogue/slab_weight_gradient.h). Of a tile that is one part of a sum, D
// is left for later.

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
