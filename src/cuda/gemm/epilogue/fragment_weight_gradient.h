// The weight gradients' epilogue by threads (sm80, sm100). D or its transpose is an expert's
// gradient, in 16 bits or float32: it is written, or added to the old gradient in float32 and
// rounded once. D's columns have one or two parts; each part is a gradient.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/fragment.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/epilogue/store_threads.h"
#include "cuda/gemm/epilogue/weight_gradient.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"

namespace tilemoe::cuda {

// Works on some columns of all of a warp's fragments.
template <class Shape, class Out, OutputMajor kMajor>
class FragmentWeightGradient {
 public:
  static constexpr bool kFloat = std::is_same_v<Out, float>;
  static constexpr bool kTransposed = kMajor == OutputMajor::kColumn;

  struct Params {
    Gradient<Out> part[2];
    GradientSize size;  // of D, the columns of a part
    int32_t blocks_a_part;
    bool accumulate;
  };

  static Params params(const WeightGradient& step) {
    const int64_t columns = step.dense_columns;
    Params params{
        .part = {},
        .size = {.rows = static_cast<int32_t>(step.gathered.shape[1]),
                 .columns = static_cast<int32_t>(columns)},
        .blocks_a_part = static_cast<int32_t>((columns + Shape::BLOCK_N - 1) / Shape::BLOCK_N),
        .accumulate = step.accumulate};
    for (int p = 0; p < step.parts; ++p) {
      const tilemoe_tensor& out = step.part[p].out;  // (E, columns, rows)
      params.part[p] = {.data = static_cast<Out*>(out.data),
                        .expert_stride = out.stride[0],
                        .stride = out.stride[kTransposed ? 1 : 2]};
    }
    return params;
  }

  __device__ explicit FragmentWeightGradient(const Params& params) : params_(params) {}

  // Place of a tile's columns from `column` on; the warp's rows begin at Shape::fragment_row().
  __device__ GradientPlace place_of(const Tile& tile, int32_t column) const {
    const int32_t part = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    return {part, tile.expert, tile.m_block * Shape::BLOCK_M,
            (tile.n_block - part * params_.blocks_a_part) * Shape::BLOCK_N + column};
  }
  // Whether a tile does not change the gradient.
  __device__ bool leaves(const Tile& tile) const {
    const bool nothing_to_add = params_.accumulate && tile.row_begin == tile.row_end;
    return tile.m_block * Shape::BLOCK_M >= params_.size.rows || nothing_to_add;
  }

  template <int kFragments, int kNumbers>
  __device__ __forceinline__ void store(float (&D)[kFragments][kNumbers],
                                        const GradientPlace& place) const {
    const GradientSize& size = params_.size;
    const Gradient<Out>& gradient = params_.part[place.part];
    if (params_.accumulate) add_gradient<Shape, kMajor>(gradient, size, place, D);
    if constexpr (kFloat)
      write_gradient<Shape, kMajor>(gradient, size, place, D);
    else if constexpr (kTransposed)
      store_transposed(gradient, place, D);
    else
      store_rows(gradient, place, D);
  }

 private:
  template <int kFragments, int kNumbers>
  __device__ __forceinline__ void store_rows(const Gradient<Out>& to, const GradientPlace& place,
                                             const float (&D)[kFragments][kNumbers]) const {
    using Rows = StoreByThreads<Shape, Out, 32>;
    const typename Rows::Output out{.data = to.data,
                                    .row_stride = to.stride,
                                    .part_stride = to.expert_stride,
                                    .columns = params_.size.columns};
    constexpr int kWide = 2 * kNumbers / 32 * 32;
    store_columns<Shape, kWide>(Rows(0, 0), out, place.row, params_.size.rows, place.expert,
                                place.column, [&](int m, int i) { return D[m][i]; });
    if constexpr (kWide < 2 * kNumbers) store_last_columns<kWide>(to, place, D);
  }

  // The columns from kFirst on, too few for 16 bytes per lane and row: 4 bytes at a time.
  template <int kFirst, int kFragments, int kNumbers>
  __device__ __forceinline__ void store_last_columns(const Gradient<Out>& to,
                                                     const GradientPlace& place,
                                                     const float (&D)[kFragments][kNumbers]) const {
    const int32_t column = place.column + fragment::column();
    Out* const first = to.data + place.expert * to.expert_stride + column;
#pragma unroll
    for (int m = 0; m < kFragments; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = place.row + Shape::fragment_row(m) + fragment::row(half);
        if (row >= params_.size.rows) continue;
#pragma unroll
        for (int j = kFirst / 8; j < kNumbers / 4; ++j) {
          const float* const two = &D[m][4 * j + 2 * half];
          if (column + 8 * j < params_.size.columns)
            *reinterpret_cast<uint32_t*>(first + row * to.stride + 8 * j) =
                pack(two[0], two[1], Out());
        }
      }
  }

  // Transposes blocks of 8x8 numbers in registers. Then each of the four lanes of a column of D has
  // 2 of its rows of each block, and exchanges them for 8 rows of one block.
  template <int kFragments, int kNumbers>
  __device__ __forceinline__ void store_transposed(const Gradient<Out>& to,
                                                   const GradientPlace& place,
                                                   const float (&D)[kFragments][kNumbers]) const {
    constexpr int kRun = 8;  // rows of D that a lane writes
    const int32_t lane = fragment::lane();
    const int32_t row = place.row + Shape::fragment_row(0) + lane % 4 * kRun;
    const int32_t column = place.column + lane / 4;
    Out* const first = to.data + place.expert * to.expert_stride + column * to.stride + row;
#pragma unroll
    for (int j = 0; j < kNumbers / 4; ++j)
#pragma unroll
      for (int m = 0; m < kFragments; m += 2) {
        uint32_t block[4];
#pragma unroll
        for (int b = 0; b < 4; ++b) {
          const float* const two = &D[m + b / 2][4 * j + b % 2 * 2];
          block[b] = ptx::movmatrix(pack(two[0], two[1], Out()));
        }
        const uint4 run = words_of_group(block, lane);
        if (row + m * fragment::kRows < params_.size.rows && column + 8 * j < params_.size.columns)
          *reinterpret_cast<uint4*>(first + 8 * j * to.stride + m * fragment::kRows) = run;
      }
  }

  const Params& params_;
};

}  // namespace tilemoe::cuda
