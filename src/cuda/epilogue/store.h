// D + bias, rounded and stored.
#pragma once

#include <cstdint>

#include "cuda/epilogue/bias.h"
#include "cuda/epilogue/output.h"
#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"

namespace tilemoe::cuda {

template <class Shape>
class StoreEpilogue {
 public:
  static constexpr int kSlice = slice_columns(Shape::BLOCK_N);
  using Slices = SliceStore<Shape, kSlice>;
  static constexpr int kSharedBytes = Slices::kSharedBytes;

  struct Params {
    Output D;  // (capacity, 1, columns)
    Bias bias;
  };

  __device__ StoreEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), slices_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    const int32_t rows = tile.row_end - row;
    if (rows <= 0) return;
    const int32_t first = tile.n_block * Shape::BLOCK_N;
    add_bias<Shape, 0, Shape::BLOCK_N>(params_.bias, tile.expert, first, D);
#pragma unroll
    for (int slice = 0; slice < Shape::BLOCK_N / kSlice; ++slice) {
      const int32_t column = first + slice * kSlice;
      if (column >= params_.D.columns) break;
      slices_.store(params_.D, row, rows, 0, column,
                    [&](int m, int j, int i) { return D[m][slice * (kSlice / 2) + 4 * j + i]; });
    }
  }

  __device__ void finish() const {
    slices_.finish();
  }

 private:
  const Params& params_;
  Slices slices_;
};

}  // namespace tilemoe::cuda
