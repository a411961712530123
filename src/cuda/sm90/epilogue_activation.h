// The up-projection's end: H = D + bias, stored where it is wanted, and A = act(H) from the float32
// accumulators, so that inference and training give equal bits. Plain SwiGLU's is in swiglu.h.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/activation_functions.h"
#include "cuda/epilogue/bias.h"
#include "cuda/sm90/shape.h"
#include "cuda/sm90/store_ragged.h"

namespace tilemoe::cuda {

// A tile's columns are kParts parts of equal width: gate, then up of the same columns of A.
template <class Shape, Activations kActivations>
class ActivationEpilogue {
 public:
  static constexpr int kParts = kActivations == Activations::kPlain ? 1 : 2;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of A
  using Rows = RaggedStore<Shape>;
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    RaggedOutput H;  // (capacity, kParts, n); may be not wanted
    RaggedOutput A;  // (capacity, 1, n)
    Bias bias[kParts];
    ActivationParams activation;
  };

  __device__ ActivationEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    if (row >= tile.row_end) return;
    const int32_t column = tile.n_block * kColumns;
    add_bias<Shape, 0, kColumns>(params_.bias[0], tile.expert, column, D);
    if constexpr (kParts == 2)
      add_bias<Shape, kUp, kColumns>(params_.bias[1], tile.expert, column, D);
    store_part<0>(params_.H, 0, row, tile.row_end, column, D);
    if constexpr (kParts == 2) store_part<kUp>(params_.H, 1, row, tile.row_end, column, D);
    // All at once: the switch over activations inside the loop over slices spilled registers.
    with_activation<kActivations>(params_.activation, [&](const auto& f) {
#pragma unroll
      for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
        for (int i = 0; i < kUp; ++i)
          D[m][i] = f(D[m][i], kParts == 2 ? D[m][(kUp + i) % kAll] : 0.f);
    });
    store_part<0>(params_.A, 0, row, tile.row_end, column, D);
  }

  __device__ void finish() const {
    rows_.finish();
  }

 private:
  static constexpr int kAll = Shape::BLOCK_N / 2;  // accumulators of a subtile
  static constexpr int kUp = kColumns / 2;         // the first of the up part

  // The part that begins at accumulator kFirst.
  template <int kFirst>
  __device__ __forceinline__ void store_part(const RaggedOutput& out, int32_t part, int32_t row,
                                             int32_t row_end, int32_t column,
                                             const Accumulators<Shape>& D) const {
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
      for (int first = 0; first < kColumns; first += Rows::kBatchColumns)
        rows_.store(out, row + m * 64, row_end, part, column + first,
                    [&](int j, int i) { return D[m][kFirst + first / 2 + 4 * j + i]; });
  }

  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda
