// The up-projection's end where W1 has gate and up in adjacent columns, and so has H: H = D + bias,
// stored as it is, and A = act(H) from two neighbouring accumulators of one thread.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/activation_functions.h"
#include "cuda/epilogue/bias.h"
#include "cuda/sm90/shape.h"
#include "cuda/sm90/store_ragged.h"

namespace tilemoe::cuda {

// Of eight columns, lane q of the four that share a row has column q (left) and column 4 + q
// (right); it gets columns 2q and 2q + 1. Every lane sends one of its two to each of two others.
__device__ __forceinline__ float2 side_by_side(float left, float right) {
  const uint32_t lane = threadIdx.x % 4;
  const bool odd = lane & 1, upper = lane & 2;
  const auto from = static_cast<int>((lane & 1) << 1 | lane >> 1);
  const float first = __shfl_sync(0xffffffff, odd ? right : left, from, 4);
  const float second = __shfl_sync(0xffffffff, odd ? left : right, from ^ 1, 4);
  return upper ? float2{second, first} : float2{first, second};
}

template <class Shape>
class AdjacentActivationEpilogue {
 public:
  static constexpr int kColumns = Shape::BLOCK_N / 2;  // of A
  using Rows = RaggedStore<Shape>;
  static_assert(kColumns % Rows::kBatchColumns == 0);
  static constexpr int kSharedBytes = Rows::kSharedBytes;

  struct Params {
    RaggedOutput H;  // (capacity, 1, 2n); may be not wanted
    RaggedOutput A;  // (capacity, 1, n)
    Bias bias;       // (E, 2n)
    ActivationParams activation;
  };

  __device__ AdjacentActivationEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), rows_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    if (row >= tile.row_end) return;
    const int32_t first = tile.n_block * Shape::BLOCK_N;
    add_bias<Shape, 0, Shape::BLOCK_N>(params_.bias, tile.expert, first, D);
    store_columns<Shape::BLOCK_N>(params_.H, row, tile.row_end, first, D);
    with_activation<Activations::kGated>(params_.activation, [&](const auto& f) {
#pragma unroll
      for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
        for (int j = 0; j < kColumns / 8; ++j)
#pragma unroll
          for (int half = 0; half < 2; ++half) {
            const float* H = &D[m][8 * j + 2 * half];
            const float2 A = side_by_side(f(H[0], H[1]), f(H[4], H[5]));
            D[m][4 * j + 2 * half] = A.x;
            D[m][4 * j + 2 * half + 1] = A.y;
          }
    });
    store_columns<kColumns>(params_.A, row, tile.row_end, first / 2, D);
  }

  __device__ void finish() const {
    rows_.finish();
  }

 private:
  // The first kCount columns of the accumulators.
  template <int kCount>
  __device__ __forceinline__ void store_columns(const RaggedOutput& out, int32_t row,
                                                int32_t row_end, int32_t column,
                                                const Accumulators<Shape>& D) const {
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
      for (int first = 0; first < kCount; first += Rows::kBatchColumns)
        rows_.store(out, row + m * 64, row_end, 0, column + first,
                    [&](int j, int i) { return D[m][first / 2 + 4 * j + i]; });
  }

  const Params& params_;
  Rows rows_;
};

}  // namespace tilemoe::cuda
