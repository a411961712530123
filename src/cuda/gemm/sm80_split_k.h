// Split-K of the weight gradients on sm80. gemm/split_k.h, for sm90 and sm100, explains it.
// (By that text, sm80's kernels for Blackwell would be other machine code.)
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/core/experts_plan.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/sm80.h"

namespace tilemoe::cuda::sm80 {

// The partial sums of a tile: slices that a column of warps has; of each slice, the threads'
// accumulators, 4 at a time.
template <class Shape>
struct PartialSums {
  static constexpr int kVectors = Shape::kWarpColumns / 2 / 4;            // of a fragment
  static constexpr int kThreads = Shape::kThreads / Shape::kWarpsAcross;  // of such a column
  static constexpr int kAcross = Shape::kWarpsAcross;

  float4* data;

  __device__ __forceinline__ void write(int32_t tile, const Accumulators<Shape>& D) const {
    const auto thread = static_cast<int32_t>(threadIdx.x);
    const int32_t warp = thread / kWarp;
    float4* const to = of(tile, Shape::warp_across()) + warp / kAcross * kWarp + thread % kWarp;
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* const value = &D[m][4 * v];
        to[(m * kVectors + v) * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  // Adds the slice of a column of warps to the accumulators of a CTA that has only this column.
  __device__ __forceinline__ void add(int32_t tile, int32_t across, Accumulators<Shape>& D) const {
    const float4* const from = of(tile, across) + threadIdx.x;
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float4 part = from[(m * kVectors + v) * kThreads];
        float* const value = &D[m][4 * v];
        value[0] += part.x, value[1] += part.y, value[2] += part.z, value[3] += part.w;
      }
  }

 private:
  __device__ float4* of(int32_t tile, int32_t across) const {
    return data + (static_cast<int64_t>(tile) * kAcross + across) *
                      (Shape::kFragments * kVectors * kThreads);
  }
};

// `Shape` and `Order` are the GEMM's; `Epilogue` is that of the shape of one column of its warps.
template <class Shape_, class Order_, class Epilogue_>
struct ReduceSplits {
  using Shape = Shape_;
  using Order = Order_;
  using Epilogue = Epilogue_;

  typename Order::Params order;
  typename Epilogue::Params epilogue;
  PartialSums<Shape> partial_sums;
};

// CTA (i, j) has the border of splits i and i + 1, and the column j of warps of the tile that this
// border cuts, counted over the tile's halves. If several borders cut a tile, the first one's CTA
// has it. The partial sums are added in the order of the rows.
template <class Sums>
__global__ void __launch_bounds__(PartialSums<typename Sums::Shape>::kThreads)
    reduce_splits(const __grid_constant__ Sums params) {
  using Shape = typename Sums::Shape;
  constexpr int32_t kAcross = Shape::kWarpsAcross;
  wait_for_previous();
  const LongTiles long_tiles(params.order.long_tiles);
  const int32_t border = static_cast<int32_t>(blockIdx.x) + 1;
  const Splits& splits = long_tiles.splits();
  if (border >= splits.count) return;
  const int32_t at = splits.begin(border);
  const LongTiles::Place place = long_tiles.at(at, long_tiles.rank_at(at));
  const int32_t tile_begin = at - place.k_block;
  if (place.k_block == 0 || splits.begin(border - 1) > tile_begin) return;

  const auto across = static_cast<int32_t>(blockIdx.y) % kAcross;
  const auto half = static_cast<int32_t>(blockIdx.y) / kAcross;
  Tile tile = Sums::Order::tile_of(params.order, place.expert, place.tile, half);
  const int32_t tile_end = tile_begin + tile.k_blocks;
  tile.n_block = tile.n_block * kAcross + across;
  if (tile.m_block * Shape::BLOCK_M >= params.epilogue.gradient.size.rows) return;
  Accumulators<Shape> D = {};
  const auto add = [&](int32_t split, bool at_its_end) {
    params.partial_sums.add(Splits::partial_sum(split, at_its_end) * 2 + half, across, D);
  };
  add(border - 1, true);
  for (int32_t split = border; splits.begin(split) < tile_end; ++split) add(split, false);
  typename Sums::Epilogue(params.epilogue).store(D, tile);
}

// For the GEMM that was launched with `params`.
template <class Gemm>
void launch_reduce_splits(const typename Gemm::Params& params, const WeightGradient& step) {
  using Shape = typename Gemm::Shape;
  using Column =
      TileShape<typename Shape::Recipe, TileConfiguration{Shape::BLOCK_M, Shape::kWarpColumns}>;
  using Epilogue = typename Gemm::Epilogue::template Of<Column>;
  using Sums = ReduceSplits<Shape, typename Gemm::Order, Epilogue>;
  constexpr int kAcross = Shape::kWarpsAcross;
  static_assert(Column::kThreads == PartialSums<Shape>::kThreads);
  typename Epilogue::Params columns = Epilogue::params(step, nullptr);
  columns.gradient.blocks_a_part = params.epilogue.gradient.blocks_a_part * kAcross;
  launch_pdl<reduce_splits<Sums>>(
      {.device = device_of(step.tuning.plan),
       .blocks = dim3(static_cast<unsigned>(step.splits - 1), kAcross * 2),
       .threads = Column::kThreads,
       .stream = static_cast<cudaStream_t>(step.stream)},
      Sums{.order = params.order,
           .epilogue = columns,
           .partial_sums = params.epilogue.partial_sums});
}

}  // namespace tilemoe::cuda::sm80
