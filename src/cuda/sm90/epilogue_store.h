// D + bias, rounded and stored beside the next tile's products.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm90/held_tile.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

template <class Shape, SlabStore Rows>
class StoreEpilogue {
 public:
  static_assert(Shape::BLOCK_N % Rows::kBatchColumns == 0);
  static constexpr int kColumns = Shape::BLOCK_N;
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    typename Rows::Output D;  // (capacity, 1, columns)
    Bias bias;
  };

  // Of `bias` (E, columns), which may be absent.
  static Params params(const tilemoe_tensor& D, const tilemoe_tensor& bias) {
    return {.D = Rows::output(D, 1, D.shape[1]), .bias = bias_of(bias)};
  }

  __device__ StoreEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  static constexpr int kBatches = Shape::BLOCK_N / Rows::kBatchColumns;

  __device__ __forceinline__ void hold(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    row_ = row;
    row_end_ = tile.row_end;
    column_ = tile.n_block * Shape::BLOCK_N;
    if (row_ >= row_end_) return;
    add_bias<typename Shape::Element, 0, Shape::BLOCK_N>(params_.bias, tile.expert, column_, D);
    held_.round(D);
  }

  __device__ __forceinline__ void store_held(int32_t batch) {
    if (row_ >= row_end_) return;
#pragma unroll
    for (int i = 0; i < kBatches; ++i)
      if (i == batch)  // registers have constant numbers
#pragma unroll
        for (int m = 0; m < Shape::kSlabs; ++m)
          rows_.store_packed(params_.D, m, row_, row_end_, 0, column_ + i * Rows::kBatchColumns,
                             &held_.words[m][i * Rows::kBatchColumns / 8]);
  }

  __device__ void finish() const {
    rows_.finish();
  }

 private:
  const Params& params_;
  Rows rows_;
  HeldTile<Shape> held_;
  int32_t row_ = 0, row_end_ = 0, column_;  // of the tile that is held; no row: none is
};

}  // namespace tilemoe::cuda::sm90
