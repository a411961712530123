// The up-projection's end: H = D + bias, stored where it is wanted, and A = act(H) from the float32
// accumulators, so that inference and training give equal bits.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/epilogue/activation.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

// A warp's columns are kParts parts of equal width: gate, then up of the same columns of A; or where
// W1 has these in adjacent columns, and so has H, one part of both.
template <class Shape, Activations kActivations, bool kAdjacent, SlabStore Rows>
class ActivationEpilogue {
 public:
  static constexpr int kParts = kActivations == Activations::kPlain || kAdjacent ? 1 : 2;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of a part
  static_assert(!kAdjacent || kActivations == Activations::kGated);

  struct Params {
    typename Rows::Output H;  // (capacity, kParts, columns of a part); may be not wanted
    typename Rows::Output A;  // (capacity, 1, n)
    Bias bias[kParts];
    ActivationParams activation;
  };

  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    Params params{.H = Rows::output(H, biases.count, biases.columns),
                  .A = Rows::output(A, 1, experts.n),
                  .bias = {},
                  .activation = activation_params(experts)};
    for (int p = 0; p < kParts; ++p) params.bias[p] = bias_of(biases.part[p]);
    return params;
  }

  __device__ explicit ActivationEpilogue(const Params& params) : params_(params) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    if (tile.row_begin + Shape::slab_row(0) >= tile.row_end) return;
    const int32_t column = tile.n_block * kColumns + Shape::slab_column() / kParts;
    finish_part<0>(0, tile, column, D);
    if constexpr (kParts == 2) finish_part<kWarpPart / 2>(1, tile, column, D);
    constexpr int kActivated = kAdjacent ? kWarpPart / 2 : kWarpPart;  // columns of A
    if constexpr (kAdjacent)
      activate_adjacent(params_.activation, D);
    else
      activate<kActivations>(params_.activation, D);
    store_columns<Shape, kActivated>(Rows(0, 0), params_.A, tile.row_begin, tile.row_end, 0,
                                     kAdjacent ? column / 2 : column,
                                     [&](int m, int i) { return D[m][i]; });
  }

 private:
  static constexpr int kWarpPart = Shape::kWarpColumns / kParts;  // columns

  // H's part that begins at a lane's number kFirst.
  template <int kFirst>
  __device__ __forceinline__ void finish_part(int part, const Tile& tile, int32_t column,
                                              Accumulators<Shape>& D) const {
    add_bias<typename Shape::Element, kFirst, kWarpPart>(params_.bias[part], tile.expert, column,
                                                         D);
    store_columns<Shape, kWarpPart>(Rows(0, 0), params_.H, tile.row_begin, tile.row_end, part,
                                    column, [&](int m, int i) { return D[m][kFirst + i]; });
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda::sm80
