// D + bias, rounded and stored.
#pragma once

#include <cstdint>

#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/ragged_store.h"
#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"

namespace tilemoe::cuda {

template <class Shape>
class StoreEpilogue {
 public:
  using Rows = RaggedStore<Shape>;
  static_assert(Shape::BLOCK_N % Rows::kBatchColumns == 0);
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    RaggedOutput D;  // (capacity, 1, columns)
    Bias bias;
  };

  __device__ StoreEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    if (row >= tile.row_end) return;
    const int32_t column = tile.n_block * Shape::BLOCK_N;
    add_bias<Shape, 0, Shape::BLOCK_N>(params_.bias, tile.expert, column, D);
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
      for (int first = 0; first < Shape::BLOCK_N; first += Rows::kBatchColumns)
        rows_.store(params_.D, row + m * 64, tile.row_end, 0, column + first,
                    [&](int j, int i) { return D[m][first / 2 + 4 * j + i]; });
  }

  __device__ void finish() const {
    rows_.finish();
  }

 private:
  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda
