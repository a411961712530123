// Accumulators of a tile in memory, in float32 and in the order of the threads that have them: for
// sums that several blocks have parts of.
#pragma once

#include <cstddef>
#include <cstdint>

#include "cuda/core/launch.h"
#include "cuda/gemm/schedule/expert_tiles.h"
#include "cuda/gemm/sm90.h"
#include "cuda/gemm/sm90_epilogue.h"
#include "cuda/ops/table.h"
#include "cuda/ptx/address.h"

namespace tilemoe::cuda::sm90 {

// Of each tile, slices of kSlice columns; of each slice, the threads' accumulators 4 at a time.
template <class Shape>
struct PartialSums {
  static constexpr int kSlice = 64;
  static constexpr int kSlices = Shape::BLOCK_N / kSlice;
  static constexpr int kVectors = kSlice / 2 / 4;  // of a thread and slice
  static constexpr int kThreads = kConsumers * kWarpgroup;
  static constexpr size_t kTileBytes = size_t{kSlices} * kVectors * kThreads * sizeof(float4);
  static_assert(Shape::kFragments == 1 && Shape::kSchedule == Schedule::kCooperative);

  float4* data;

  __device__ __forceinline__ void write(int32_t tile, const Accumulators<Shape>& D) const {
#pragma unroll
    for (int slice = 0; slice < kSlices; ++slice)
#pragma unroll
      for (int v = 0; v < kVectors; ++v) {
        const float* value = &D[0][slice * (kSlice / 2) + 4 * v];
        of(tile, slice)[v * kThreads] = {value[0], value[1], value[2], value[3]};
      }
  }

  // Adds one slice to the accumulators of a tile that is as wide.
  __device__ __forceinline__ void add(int32_t tile, int32_t slice, float (&D)[kSlice / 2]) const {
#pragma unroll
    for (int v = 0; v < kVectors; ++v) {
      const float4 part = of(tile, slice)[v * kThreads];
      D[4 * v] += part.x, D[4 * v + 1] += part.y, D[4 * v + 2] += part.z, D[4 * v + 3] += part.w;
    }
  }

 private:
  // A consumer's thread; the producer's come before.
  __device__ float4* of(int32_t tile, int32_t slice) const {
    return data + (static_cast<int64_t>(tile) * kSlices + slice) * (kVectors * kThreads) +
           threadIdx.x - kWarpgroup;
  }
};

// The last part of a weight gradient: tiles of long experts that several shares have parts of.

// `Shape` and `Order` are the product's; `Epilogue` is one for tiles of as many rows and of the
// columns of a slice of partial sums.
template <class Shape, class Order, class Epilogue>
struct ReduceSplits {
  typename Order::Params order;
  typename Epilogue::Params epilogue;
  PartialSums<Shape> partial_sums;
};

// Block (i, j) has the border of shares i and i + 1, and of the tile that it cuts the slice j of
// columns, counted over its halves. A tile that more borders cut is the first one's. The parts are
// added in the order of the rows that they are sums over.
template <class Shape, class Order, class Epilogue>
__global__ void __launch_bounds__(kBlockThreads)
    reduce_splits(const __grid_constant__ ReduceSplits<Shape, Order, Epilogue> params) {
  constexpr int32_t kSlices = PartialSums<Shape>::kSlices;
  __shared__ __align__(kSwizzleAtom) uint8_t memory[kConsumers * Epilogue::kSharedBytes + 16];
  wait_for_previous();
  const auto consumer = static_cast<int32_t>(threadIdx.x / kWarpgroup) - 1;
  if (consumer < 0) return;  // the epilogue's threads are consumers of a product's block
  const LongTiles long_tiles(params.order.long_tiles);
  const int32_t border = static_cast<int32_t>(blockIdx.x) + 1;
  const Splits& splits = long_tiles.splits();
  if (border >= splits.count) return;
  const int32_t at = splits.begin(border);
  const LongTiles::Place place = long_tiles.at(at, long_tiles.rank_at(at));
  const int32_t tile_begin = at - place.k_block;
  if (place.k_block == 0 || splits.begin(border - 1) > tile_begin) return;

  const auto slice = static_cast<int32_t>(blockIdx.y) % kSlices;
  const auto half = static_cast<int32_t>(blockIdx.y) / kSlices;
  Tile tile = Order::tile_of(params.order, place.expert, place.tile, half);
  const int32_t tile_end = tile_begin + tile.k_blocks;
  tile.n_block = tile.n_block * kSlices + slice;
  float D[1][PartialSums<Shape>::kSlice / 2] = {};
  const auto add = [&](int32_t split, bool at_its_end) {
    params.partial_sums.add(Splits::partial_sum(split, at_its_end) * 2 + half, slice, D[0]);
  };
  if (tile.m_block * Shape::BLOCK_M >= params.epilogue.size.rows) return;
  add(border - 1, true);
  for (int32_t split = border; splits.begin(split) < tile_end; ++split) add(split, false);

  Epilogue epilogue(params.epilogue,
                    ptx::shared_address(memory) + consumer * Epilogue::kSharedBytes,
                    static_cast<int32_t>(threadIdx.x % kWarpgroup));
  store_at_once(epilogue, D, tile, tile.row_begin + consumer * Shape::kRows);
  epilogue.finish();
}

// Of the product that was started with `params`.
template <class Gemm>
void launch_reduce_splits(const typename Gemm::Params& params, const WeightGradient& step) {
  using Shape = typename Gemm::Shape;
  using Sums = PartialSums<Shape>;
  using Slice = TileShape<typename Shape::Recipe,
                          TileConfiguration{Shape::BLOCK_M, Sums::kSlice, Shape::kSchedule}>;
  using Epilogue = typename Gemm::Epilogue::template Of<Slice>;
  using Order = typename Gemm::Order;
  typename Epilogue::Params slices = Epilogue::params(step, nullptr);
  slices.blocks_a_part = params.epilogue.blocks_a_part * Sums::kSlices;
  launch_pdl<reduce_splits<Shape, Order, Epilogue>>(
      {.blocks = dim3(static_cast<unsigned>(step.splits - 1), Sums::kSlices * 2),
       .threads = kBlockThreads,
       .stream = static_cast<cudaStream_t>(step.stream)},
      ReduceSplits<Shape, Order, Epilogue>{
          .order = params.order, .epilogue = slices, .partial_sums = params.epilogue.partial_sums});
}

}  // namespace tilemoe::cuda::sm90
