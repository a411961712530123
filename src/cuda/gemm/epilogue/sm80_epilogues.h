// The four epilogues of sm80. Each is a loop over a warp's fragments: unrolled, the gradient of a
// gated activation is about 90 KiB of instructions, which an SM fetches again for each tile.
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

// One fragment of a warp, as functions of several fragments take it.
template <class Shape>
using OneFragment = AccumulatorFragments<1, Shape::kWarpColumns>;

// Calls body(m, fragment m) for each fragment until body returns false. Registers have constant
// numbers, so the other fragments move up by one after each call, and D is lost.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_fragment(Accumulators<Shape>& D, const Body& body) {
#pragma unroll 1
  for (int m = 0; m < Shape::kFragments; ++m) {
    if (!body(m, reinterpret_cast<OneFragment<Shape>&>(D[0]))) return;
#pragma unroll
    for (int later = 1; later < Shape::kFragments; ++later)
#pragma unroll
      for (int i = 0; i < Shape::kWarpColumns / 2; ++i) D[later - 1][i] = D[later][i];
  }
}

// The up-projection (epilogue/fragment_activation.h). A warp's columns are a fragment's parts.
template <class Shape, Activations kActivations, bool kInterleavedColumns, FragmentStore Rows>
class ActivationEpilogue {
 public:
  using Fragment = FragmentActivation<Shape, kActivations, kInterleavedColumns, Rows>;
  static constexpr int kParts = Fragment::kParts;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of a part

  using Params = typename Fragment::Params;
  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return Fragment::params(H, A, biases, experts);
  }

  __device__ explicit ActivationEpilogue(const Params& params) : fragment_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::fragment_column() / kParts < fragment_.columns() &&
           tile.row_begin + Shape::fragment_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::fragment_column() / kParts;
    for_each_fragment<Shape>(D, [&](int m, OneFragment<Shape>& fragment) {
      if (tile.row_begin + Shape::fragment_row(m) >= tile.row_end) return false;
      fragment_.finish(m, tile, column, fragment);
      return true;
    });
  }

 private:
  Fragment fragment_;
};

// The activation gradient (epilogue/fragment_activation_gradient.h). A warp's columns are one group
// of columns of ds.
template <class Shape, Activations kActivations>
class ActivationGradientEpilogue {
 public:
  using Fragment = FragmentActivationGradient<Shape, kActivations>;
  static constexpr int kColumns = Shape::BLOCK_N;
  static_assert(Shape::kWarpColumns == kDsColumns, "a warp has a group of ds");

  using Params = typename Fragment::Params;
  static Params params(const ActivationGradient& step) { return Fragment::params(step); }

  __device__ explicit ActivationGradientEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::fragment_column() < params_.H.n &&
           tile.row_begin + Shape::fragment_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::fragment_column();
    if (column >= params_.H.n) return;
    with_activation<kActivations>(params_.activation, [&](const auto& f) {
      const Fragment fragment(params_);
      const typename Fragment::H h(params_.H, tile);
      for_each_fragment<Shape>(D, [&](int m, const OneFragment<Shape>& dA) {
        return fragment.finish(f, h, m, tile, column, dA);
      });
    });
  }

 private:
  const Params& params_;
};

// The down-projection and the input gradient: rounds D + bias and stores it.
template <class Shape, FragmentStore Rows>
class StoreEpilogue {
 public:
  static constexpr int kColumns = Shape::BLOCK_N;

  struct Params {
    typename Rows::Output D;  // (capacity, 1, columns)
    Bias bias;
  };

  // `bias` (E, columns) may be absent.
  static Params params(const tilemoe_tensor& D, const tilemoe_tensor& bias) {
    return {.D = Rows::output(D, 1, D.shape[1]), .bias = bias_of(bias)};
  }

  __device__ explicit StoreEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::fragment_column() < params_.D.columns &&
           tile.row_begin + Shape::fragment_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::fragment_column();
    add_bias<typename Shape::Element, 0, Shape::kWarpColumns>(params_.bias, tile.expert, column, D);
    store_columns<Shape, Shape::kWarpColumns>(Rows(0, 0), params_.D, tile.row_begin, tile.row_end,
                                              0, column, [&](int m, int i) { return D[m][i]; });
  }

 private:
  const Params& params_;
};

// The weight gradients (epilogue/fragment_weight_gradient.h). D of a tile whose sum a split's
// border cuts goes to the partial sums.
template <class Shape, class Out, OutputMajor kMajor>
class WeightGradientEpilogue {
 public:
  template <class Other>
  using Of = WeightGradientEpilogue<Other, Out, kMajor>;  // the same epilogue for another shape
  using AccumulatorFragments = FragmentWeightGradient<Shape, Out, kMajor>;

  struct Params {
    typename AccumulatorFragments::Params gradient;
    PartialSums<Shape> partial_sums;
  };

  // The partial sums have the GEMM's tiles: an epilogue of another shape writes none.
  static Params params(const WeightGradient& step, void* partial_sums) {
    return {.gradient = AccumulatorFragments::params(step),
            .partial_sums = {static_cast<float4*>(partial_sums)}};
  }

  __device__ explicit WeightGradientEpilogue(const Params& params) : params_(params) {}

  __device__ bool wants(const Tile& tile) const {
    const AccumulatorFragments fragments(params_.gradient);
    const GradientPlace place = fragments.place_of(tile, Shape::fragment_column());
    return place.row + Shape::fragment_row(0) < params_.gradient.size.rows &&
           place.column < params_.gradient.size.columns && !fragments.leaves(tile);
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const AccumulatorFragments fragments(params_.gradient);
    const GradientPlace place = fragments.place_of(tile, Shape::fragment_column());
    if (fragments.leaves(tile)) return;
    if (tile.partial_sum >= 0) return params_.partial_sums.write(tile.partial_sum, D);
    fragments.store(D, place);
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm80
