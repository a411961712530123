// D + bias, rounded and stored.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

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

}  // namespace tilemoe::cuda::sm80
