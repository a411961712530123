// D, or its transpose, as an expert's weight gradient: written, or added to what is there in
// float32 and rounded once, in 16 bits or float32. D's columns are in one or two parts, a gradient
// each. Of a tile that is one part of a sum, D is left for later.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/epilogue/partial_sums.h"
#include "cuda/epilogue/ragged_store.h"
#include "cuda/epilogue/transposed_store.h"
#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"

namespace tilemoe::cuda {

// How D lies in the gradient: kRows, D's columns are contiguous; kTransposed, its rows are.
enum class Lies { kRows, kTransposed };

template <class Shape, class Out, Lies kLies>
class WeightGradientEpilogue {
 public:
  using Element = Out;
  static constexpr bool kFloat = std::is_same_v<Out, float>;
  static constexpr bool kTransposed = kLies == Lies::kTransposed;
  using Store = std::conditional_t<kTransposed, TransposedStore<Shape>, RaggedStore<Shape>>;
  using Output = std::conditional_t<kTransposed, CUtensorMap, RaggedOutput>;
  static constexpr int kSharedBytes = kFloat ? 0 : Store::kSharedBytes;

  struct Part {
    Output out;  // in 16 bits
    Out* data;
    int64_t expert_stride, stride;  // the latter of D's dimension that is not contiguous
  };
  struct Params {
    Part part[2];
    int32_t rows, columns;  // of D, the latter of a part
    int32_t blocks_a_part;
    bool accumulate;
    PartialSums<Shape> partial_sums;
  };

  __device__ WeightGradientEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), store_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    const int32_t part = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    const int32_t first_row = tile.m_block * Shape::BLOCK_M + row - tile.row_begin;
    const int32_t first_column = (tile.n_block - part * params_.blocks_a_part) * Shape::BLOCK_N;
    const bool nothing_to_add = params_.accumulate && tile.row_begin == tile.row_end;
    if (first_row >= params_.rows || nothing_to_add) return;
    if (tile.partial_sum >= 0) return params_.partial_sums.write(tile.partial_sum, D);

    const Part& to = params_.part[part];
    Out* expert = to.data + tile.expert * to.expert_stride;
    if (params_.accumulate)
      for_each_run(expert, to.stride, first_row, first_column, D, [](const Out* old, float* value) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) value[i] += static_cast<float>(old[i]);
      });
    if constexpr (kFloat) {
      for_each_run(expert, to.stride, first_row, first_column, D, [](float* out, float* value) {
        if constexpr (kRun == 2)
          *reinterpret_cast<float2*>(out) = {value[0], value[1]};
        else
          *out = value[0];
      });
    } else {
#pragma unroll
      for (int first = 0; first < Shape::BLOCK_N; first += Store::kBatchColumns) {
        const int32_t column = first_column + first;
        const auto value = [&](int j, int i) { return D[0][first / 2 + 4 * j + i]; };
        if constexpr (kTransposed) {
          if (column >= params_.columns) break;
          store_.store(to.out, first_row, tile.expert, column, value);
        } else {
          store_.store(to.out, first_row, params_.rows, tile.expert, column, value);
        }
      }
    }
  }

  __device__ void finish() const {
    store_.finish();
  }

 private:
  static constexpr int kRun = kTransposed ? 1 : 2;  // accumulators that are neighbours in memory

  // Calls visit(place, value) for the runs of accumulators that exist.
  template <class Visit>
  __device__ __forceinline__ void for_each_run(Out* expert, int64_t stride, int32_t first_row,
                                               int32_t first_column, Accumulators<Shape>& D,
                                               const Visit& visit) const {
    const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
    const auto warp = static_cast<int32_t>(threadIdx.x % kWarpgroup / kWarp);
    const int32_t column = first_column + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first_row + m * 64 + warp * kStoreRows + half * 8 + lane / 4;
        if (row >= params_.rows) continue;
        Out* place = expert + (kTransposed ? column * stride + row : row * stride + column);
#pragma unroll
        for (int j = 0; j < Shape::BLOCK_N / 8; ++j) {
          if (column + 8 * j >= params_.columns) break;
#pragma unroll
          for (int i = 0; i < 2; i += kRun)
            visit(place + (kTransposed ? (8 * j + i) * stride : 8 * j + i),
                  &D[m][4 * j + 2 * half + i]);
        }
      }
  }

  const Params& params_;
  Store store_;
};

}  // namespace tilemoe::cuda
