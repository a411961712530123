// D + bias, rounded and stored.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/store.h"
#include "cuda/sm100/each_batch.h"

namespace tilemoe::cuda::sm100 {

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

  __device__ __forceinline__ void store(const WarpAccumulators& D, const Tile& tile) const {
    const int32_t first = tile.n_block * kColumns;
    for_each_batch<Shape>(tile, first, params_.D.columns, [&](int m, int32_t column) {
      Batch batch;
      D.read(m, column - first, batch);
      add_bias<typename Shape::Element, 0, kBatchColumns>(params_.bias, tile.expert, column, batch);
      store_slab<kBatchColumns>(Rows(0, 0), params_.D, m, tile.row_begin, tile.row_end, 0, column,
                                [&](int i) { return batch[0][i]; });
    });
  }

 private:
  const Params& params_;
};

}  // namespace tilemoe::cuda::sm100
