// The up-projection's end where W1 has gate and up in adjacent columns, and so has H: H = D + bias,
// stored as it is, and A = act(H) from two neighbouring accumulators of one thread.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/core/up_columns.h"
#include "cuda/epilogue/activation.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

template <class Shape, SlabStore Rows>
class AdjacentActivationEpilogue {
 public:
  static constexpr int kParts = 1;                       // of the tile's columns
  static constexpr int kColumns = Shape::BLOCK_N;        // of H
  static constexpr int kActivated = Shape::BLOCK_N / 2;  // of A
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    typename Rows::Output H;  // (capacity, 1, 2n); may be not wanted
    typename Rows::Output A;  // (capacity, 1, n)
    Bias bias[1];             // (E, 2n)
    ActivationParams activation;
  };

  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return {.H = Rows::output(H, 1, biases.columns),
            .A = Rows::output(A, 1, experts.n),
            .bias = {bias_of(biases.part[0])},
            .activation = activation_params(experts)};
  }

  __device__ AdjacentActivationEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    if (row >= tile.row_end) return;
    const int32_t first = tile.n_block * kColumns;
    const auto number = [&](int m, int i) { return D[m][i]; };
    add_bias<typename Shape::Element, 0, kColumns>(params_.bias[0], tile.expert, first, D);
    store_columns<Shape, kColumns>(rows_, params_.H, row, tile.row_end, 0, first, number);
    activate_adjacent(params_.activation, D);
    store_columns<Shape, kActivated>(rows_, params_.A, row, tile.row_end, 0, first / 2, number);
  }

  __device__ void finish() const { rows_.finish(); }

 private:
  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda::sm90
