// D as an expert's weight gradient: written, or added to what is there in float32 and rounded once,
// in 16 bits or float32. Gradients have one or two parts along the side of the dense operand.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/epilogue/output.h"
#include "cuda/gemm/shape.h"
#include "cuda/gemm/tile.h"
#include "cuda/load/summed_rows.h"

namespace tilemoe::cuda {

template <class Shape, class Out, Side kPartsAlong>
class WeightGradientEpilogue {
 public:
  static constexpr bool kFloat = std::is_same_v<Out, float>;
  static constexpr int kSlice = slice_columns(Shape::BLOCK_N);
  using Slices = SliceStore<Shape, kSlice>;
  static constexpr int kSharedBytes = kFloat ? 0 : Slices::kSharedBytes;

  struct Part {
    Output out;  // 16 bits: (rows, E, columns), in the order of the map's dimensions
    Out* data;   // (E, rows, columns)
    int64_t expert_stride, row_stride;  // in elements
  };
  struct Params {
    Part part[2];
    int32_t rows, columns;  // of a part
    int32_t blocks_a_part;
    bool accumulate;
  };

  __device__ WeightGradientEpilogue(const Params& params, uint32_t shared, int32_t thread)
      : params_(params), slices_(shared, thread) {}

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile, int32_t row) {
    const int32_t part = block_of<kPartsAlong>(tile) >= params_.blocks_a_part ? 1 : 0;
    const int32_t before = part * params_.blocks_a_part;
    const int32_t m_block = tile.m_block - (kPartsAlong == Side::kA ? before : 0);
    const int32_t n_block = tile.n_block - (kPartsAlong == Side::kB ? before : 0);
    const int32_t first_row = m_block * Shape::BLOCK_M + row - tile.row_begin;
    const int32_t first_column = n_block * Shape::BLOCK_N;
    const int32_t rows = params_.rows - first_row;
    const bool nothing_to_add = params_.accumulate && tile.row_begin == tile.row_end;
    if (rows <= 0 || nothing_to_add) return;

    const Part& to = params_.part[part];
    Out* expert = to.data + tile.expert * to.expert_stride;
    if (params_.accumulate)
      for_each_pair(expert, to.row_stride, first_row, first_column, D,
                    [](const Out* old, float& low, float& high) {
                      low += static_cast<float>(old[0]);
                      high += static_cast<float>(old[1]);
                    });
    if constexpr (kFloat) {
      for_each_pair(expert, to.row_stride, first_row, first_column, D,
                    [](float* out, float low, float high) {
                      *reinterpret_cast<float2*>(out) = {low, high};
                    });
    } else {
      // The copy engine clips what lies past the last row, so that every warp's rows count as
      // whole.
      const int32_t whole = (rows + kStoreRows - 1) / kStoreRows * kStoreRows;
#pragma unroll
      for (int slice = 0; slice < Shape::BLOCK_N / kSlice; ++slice) {
        const int32_t column = first_column + slice * kSlice;
        if (column >= params_.columns) break;
        slices_.store(to.out, first_row, whole, tile.expert, column,
                      [&](int m, int j, int i) { return D[m][slice * (kSlice / 2) + 4 * j + i]; });
      }
    }
  }

  __device__ void finish() const {
    slices_.finish();
  }

 private:
  // Calls visit(place, low, high) for the pairs of neighbouring accumulators that exist.
  template <class Visit>
  __device__ __forceinline__ void for_each_pair(Out* expert, int64_t row_stride, int32_t first_row,
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
        Out* place = expert + row * row_stride + column;
#pragma unroll
        for (int j = 0; j < Shape::BLOCK_N / 8; ++j) {
          if (column + 8 * j >= params_.columns) break;
          visit(place + 8 * j, D[m][4 * j + 2 * half], D[m][4 * j + 2 * half + 1]);
        }
      }
  }

  const Params& params_;
  Slices slices_;
};

}  // namespace tilemoe::cuda
