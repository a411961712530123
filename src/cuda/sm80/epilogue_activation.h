// The up-projection's end: H = D + bias, stored where it is wanted, and A = act(H) from the float32
// accumulators, so that inference and training give equal bits.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/epilogue/activation.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm80/each_slab.h"
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
    const int32_t column = tile.n_block * kColumns + Shape::slab_column() / kParts;
    for_each_slab<Shape>(D, [&](int m, OneSlab<Shape>& slab) {
      if (tile.row_begin + Shape::slab_row(m) >= tile.row_end) return false;
      finish_slab(m, tile, column, slab);
      return true;
    });
  }

 private:
  static constexpr int kWarpPart = Shape::kWarpColumns / kParts;            // columns
  static constexpr int kActivated = kAdjacent ? kWarpPart / 2 : kWarpPart;  // of A

  __device__ __forceinline__ void finish_slab(int m, const Tile& tile, int32_t column,
                                              OneSlab<Shape>& H) const {
    finish_part<0>(0, m, tile, column, H);
    if constexpr (kParts == 2) finish_part<kWarpPart / 2>(1, m, tile, column, H);
    if constexpr (kAdjacent)
      activate_adjacent(params_.activation, H);
    else
      activate<kActivations>(params_.activation, H);
    store_slab<kActivated>(Rows(0, 0), params_.A, m, tile.row_begin, tile.row_end, 0,
                           kAdjacent ? column / 2 : column, [&](int i) { return H[0][i]; });
  }

  // H's part that begins at a lane's number kFirst.
  template <int kFirst>
  __device__ __forceinline__ void finish_part(int part, int m, const Tile& tile, int32_t column,
                                              OneSlab<Shape>& H) const {
    add_bias<typename Shape::Element, kFirst, kWarpPart>(params_.bias[part], tile.expert, column,
                                                         H);
    store_slab<kWarpPart>(Rows(0, 0), params_.H, m, tile.row_begin, tile.row_end, part, column,
                          [&](int i) { return H[0][kFirst + i]; });
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda::sm80
