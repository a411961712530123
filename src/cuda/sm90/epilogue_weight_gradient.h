// D, or its transpose, as an expert's weight gradient: written, or added to what is there in
// float32 and rounded once, in 16 bits or float32. D's columns are in one or two parts, a gradient
// each. Of a tile that is one part of a sum, D is left for later.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/tile.h"
#include "cuda/sm90/held_tile.h"
#include "cuda/sm90/partial_sums.h"
#include "cuda/sm90/shape.h"
#include "cuda/sm90/store_ragged.h"
#include "cuda/sm90/store_transposed.h"

namespace tilemoe::cuda {

// How D lies in the gradient: row-major, its columns are contiguous; column-major, its rows are.
enum class OutputMajor { kRow, kColumn };

template <class Shape, class Out, OutputMajor kMajor>
class WeightGradientEpilogue {
 public:
  using Element = Out;
  static constexpr bool kFloat = std::is_same_v<Out, float>;
  static constexpr bool kTransposed = kMajor == OutputMajor::kColumn;
  using Store = std::conditional_t<kTransposed, TransposedStore<Shape>, RaggedStore<Shape>>;
  using Output = std::conditional_t<kTransposed, CUtensorMap, RaggedOutput>;
  static constexpr int kSharedBytes = kFloat ? 0 : Store::kSharedBytes;
  static constexpr int kBatches = Shape::BLOCK_N / Store::kBatchColumns;

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

  // Float32: at once.
  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile,
                                        int32_t row) requires(kFloat) {
    const Place place = place_of(tile, row);
    if (!finish_sum(D, tile, place)) return;
    for_each_run(place, D, [](float* out, float* value) {
      if constexpr (kRun == 2)
        *reinterpret_cast<float2*>(out) = {value[0], value[1]};
      else
        *out = value[0];
    });
  }

  // 16 bits: later.
  __device__ __forceinline__ void hold(Accumulators<Shape>& D, const Tile& tile,
                                       int32_t row) requires(!kFloat) {
    place_ = place_of(tile, row);
    holds_ = finish_sum(D, tile, place_);
    if (holds_) held_.round(D);
  }
  __device__ __forceinline__ void store_held(int32_t batch) requires(!kFloat) {
    if (!holds_) return;
    const Output& out = params_.part[place_.part].out;
#pragma unroll
    for (int i = 0; i < kBatches; ++i) {
      if (i != batch) continue;  // registers have constant numbers
      const int32_t column = place_.column + i * Store::kBatchColumns;
      const auto* words = &held_.words[0][i * Store::kBatchColumns / 8];
      if constexpr (!kTransposed)
        store_.store_packed(out, place_.row, params_.rows, place_.expert, column, words);
      else if (column < params_.columns)
        store_.store_packed(out, place_.row, place_.expert, column, words);
    }
  }

  __device__ void finish() const {
    store_.finish();
  }

 private:
  static constexpr int kRun = kTransposed ? 1 : 2;  // accumulators that are neighbours in memory

  // Of the consumer's rows of a tile, in the gradient.
  struct Place {
    int32_t part, expert, row, column;
  };
  __device__ Place place_of(const Tile& tile, int32_t row) const {
    const int32_t part = tile.n_block >= params_.blocks_a_part ? 1 : 0;
    return {part, tile.expert, tile.m_block * Shape::BLOCK_M + row - tile.row_begin,
            (tile.n_block - part * params_.blocks_a_part) * Shape::BLOCK_N};
  }

  // Adds what is there, if it is asked for. False where nothing is to be stored, or D is one part
  // of a sum and left where these are.
  __device__ __forceinline__ bool finish_sum(Accumulators<Shape>& D, const Tile& tile,
                                             const Place& place) const {
    const bool nothing_to_add = params_.accumulate && tile.row_begin == tile.row_end;
    if (place.row >= params_.rows || nothing_to_add) return false;
    if (tile.partial_sum >= 0) {
      params_.partial_sums.write(tile.partial_sum, D);
      return false;
    }
    if (params_.accumulate)
      for_each_run(place, D, [](const Out* old, float* value) {
#pragma unroll
        for (int i = 0; i < kRun; ++i) value[i] += static_cast<float>(old[i]);
      });
    return true;
  }

  // Calls visit(place, value) for the runs of accumulators that exist.
  template <class Visit>
  __device__ __forceinline__ void for_each_run(const Place& first, Accumulators<Shape>& D,
                                               const Visit& visit) const {
    const Part& to = params_.part[first.part];
    Out* const expert = to.data + first.expert * to.expert_stride;
    const int64_t stride = to.stride;
    const auto lane = static_cast<int32_t>(threadIdx.x % kWarp);
    const auto warp = static_cast<int32_t>(threadIdx.x % kWarpgroup / kWarp);
    const int32_t column = first.column + lane % 4 * 2;
#pragma unroll
    for (int m = 0; m < Shape::kSubtiles; ++m)
#pragma unroll
      for (int half = 0; half < 2; ++half) {
        const int32_t row = first.row + m * 64 + warp * kStoreRows + half * 8 + lane / 4;
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
  HeldTile<Shape> held_;
  Place place_;  // of the tile that is held, if one is
  bool holds_ = false;
};

}  // namespace tilemoe::cuda
