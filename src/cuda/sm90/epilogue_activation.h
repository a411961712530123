// The up-projection's end: H = D + bias, stored where it is wanted, and A = act(H) from the float32
// accumulators, so that inference and training give equal bits. Plain SwiGLU's is in
// epilogue_swiglu.h.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/epilogue/activation.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

// A tile's columns are kParts parts of equal width: gate, then up of the same columns of A.
template <class Shape, Activations kActivations, SlabStore Rows>
class ActivationEpilogue {
 public:
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of A
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    typename Rows::Output H;  // (capacity, kParts, n); may be not wanted
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

  __device__ ActivationEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    using Element = typename Shape::Element;
    if (row >= tile.row_end) return;
    const int32_t column = tile.n_block * kColumns;
    add_bias<Element, 0, kColumns>(params_.bias[0], tile.expert, column, D);
    if constexpr (kParts == 2)
      add_bias<Element, kUp, kColumns>(params_.bias[1], tile.expert, column, D);
    store_part<0>(params_.H, 0, row, tile.row_end, column, D);
    if constexpr (kParts == 2) store_part<kUp>(params_.H, 1, row, tile.row_end, column, D);
    activate<kActivations>(params_.activation, D);
    store_part<0>(params_.A, 0, row, tile.row_end, column, D);
  }

  __device__ void finish() const { rows_.finish(); }

 private:
  static constexpr int kUp = kColumns / 2;  // the first accumulator of the up part

  // The part that begins at accumulator kFirst.
  template <int kFirst>
  __device__ __forceinline__ void store_part(const typename Rows::Output& out, int32_t part,
                                             int32_t row, int32_t row_end, int32_t column,
                                             const Accumulators<Shape>& D) const {
    store_columns<Shape, kColumns>(rows_, out, row, row_end, part, column,
                                   [&](int m, int i) { return D[m][kFirst + i]; });
  }

  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda::sm90
