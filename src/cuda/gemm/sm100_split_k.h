// Accumulators of a tile in memory, in float32 and in the order of the threads that have them: for
// sums that several blocks have parts of.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/sm100.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda::sm100 {

// A batch of columns of all of a warp's fragments.
template <class Shape>
using Columns = AccumulatorFragments<Shape::kFragments, kBatchColumns>;

// Of each tile, batches of columns; of each batch, the storing threads' accumulators 4 at a time.
template <class Shape>
struct PartialSums {
  static constexpr int kBatches = Shape::BLOCK_N / kBatchColumns;
  static constexpr int kVectors = kBatchColumns / 2 / 4;  // of a fragment
  static constexpr int kThreads = kStoringWarps * kWarp;

  float4* data;

  __device__ __forceinline__ void write(int32_t tile, int32_t batch,
                                        const Columns<Shape>& D) const {
    float4* const to = of(tile, batch);
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* const value = &D[m][4 * v];
        to[(m * kVectors + v) * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  __device__ __forceinline__ void add(int32_t tile, int32_t batch, Columns<Shape>& D) const {
    const float4* const from = of(tile, batch);
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
  // This thread's, of the storing ones of a product or of as many that have no others beside them.
  __device__ float4* of(int32_t tile, int32_t batch) const {
    return data +
           (static_cast<int64_t>(tile) * kBatches + batch) *
               (Shape::kFragments * kVectors * kThreads) +
           threadIdx.x % kThreads;
  }
  static_assert(kFirstStoringWarp * kWarp % kThreads == 0);
};

// The last part of a weight gradient: tiles of long experts that several shares have parts of.

// The product's.
template <class Shape_, class Order_, class Epilogue_>
struct ReduceSplits {
  using Shape = Shape_;
  using Order = Order_;
  using Epilogue = Epilogue_;

  typename Order::Params order;
  typename Epilogue::Params epilogue;
};

// Block (i, j) has the border of shares i and i + 1, and of the tile that it cuts the batch j of
// columns, counted over its halves. A tile that more borders cut is the first one's. The parts are
// added in the order of the rows that they are sums over.
template <class Sums>
__global__ void __launch_bounds__(kStoringWarps* kWarp, 4)
    reduce_splits(const __grid_constant__ Sums params) {
  using Shape = typename Sums::Shape;
  constexpr int32_t kBatches = PartialSums<Shape>::kBatches;
  wait_for_previous();
  const LongTiles long_tiles(params.order.long_tiles);
  const int32_t border = static_cast<int32_t>(blockIdx.x) + 1;
  const Splits& splits = long_tiles.splits();
  if (border >= splits.count) return;
  const int32_t at = splits.begin(border);
  const LongTiles::Place place = long_tiles.at(at, long_tiles.rank_at(at));
  const int32_t tile_begin = at - place.k_block;
  if (place.k_block == 0 || splits.begin(border - 1) > tile_begin) return;

  const auto batch = static_cast<int32_t>(blockIdx.y) % kBatches;
  const auto half = static_cast<int32_t>(blockIdx.y) / kBatches;
  const Tile tile = Sums::Order::tile_of(params.order, place.expert, place.tile, half);
  const int32_t tile_end = tile_begin + tile.k_blocks;
  if (tile.m_block * Shape::BLOCK_M >= params.epilogue.gradient.size.rows) return;
  Columns<Shape> D = {};
  const auto add = [&](int32_t split, bool at_its_end) {
    params.epilogue.partial_sums.add(Splits::partial_sum(split, at_its_end) * 2 + half, batch, D);
  };
  add(border - 1, true);
  for (int32_t split = border; splits.begin(split) < tile_end; ++split) add(split, false);
  typename Sums::Epilogue(params.epilogue).store_columns(D, tile, batch * kBatchColumns);
}

// Of the product that was started with `params`.
template <class Gemm>
void launch_reduce_splits(const typename Gemm::Params& params, const WeightGradient& step) {
  using Sums = ReduceSplits<typename Gemm::Shape, typename Gemm::Order, typename Gemm::Epilogue>;
  constexpr int kBatches = PartialSums<typename Gemm::Shape>::kBatches;
  launch_pdl<reduce_splits<Sums>>(
      {.blocks = dim3(static_cast<unsigned>(step.splits - 1), kBatches * 2),
       .threads = kStoringWarps * kWarp,
       .stream = static_cast<cudaStream_t>(step.stream)},
      Sums{.order = params.order, .epilogue = params.epilogue});
}

}  // namespace tilemoe::cuda::sm100
