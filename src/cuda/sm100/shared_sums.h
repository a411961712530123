// The last part of a weight gradient: tiles of long experts that several shares have parts of.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/schedule/long_tiles.h"
#include "cuda/sm100/partial_sums.h"
#include "cuda/sm100/shape.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda::sm100 {

// The product's.
template <class Shape_, class Order_, class Epilogue_>
struct SharedSums {
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
    add_shared_sums(const __grid_constant__ Sums params) {
  using Shape = typename Sums::Shape;
  constexpr int32_t kBatches = PartialSums<Shape>::kBatches;
  wait_for_previous();
  const LongTiles long_tiles(params.order.long_tiles);
  const int32_t border = static_cast<int32_t>(blockIdx.x) + 1;
  const Shares& shares = long_tiles.shares();
  if (border >= shares.count) return;
  const int32_t at = shares.begin(border);
  const LongTiles::Place place = long_tiles.at(at, long_tiles.rank_at(at));
  const int32_t tile_begin = at - place.k_block;
  if (place.k_block == 0 || shares.begin(border - 1) > tile_begin) return;

  const auto batch = static_cast<int32_t>(blockIdx.y) % kBatches;
  const auto half = static_cast<int32_t>(blockIdx.y) / kBatches;
  const Tile tile = Sums::Order::tile_of(params.order, place.expert, place.tile, half);
  const int32_t tile_end = tile_begin + tile.k_blocks;
  if (tile.m_block * Shape::BLOCK_M >= params.epilogue.gradient.size.rows) return;
  Columns<Shape> D = {};
  const auto add = [&](int32_t share, bool at_its_end) {
    params.epilogue.partial_sums.add(Shares::partial_sum(share, at_its_end) * 2 + half, batch, D);
  };
  add(border - 1, true);
  for (int32_t share = border; shares.begin(share) < tile_end; ++share) add(share, false);
  typename Sums::Epilogue(params.epilogue).store_columns(D, tile, batch * kBatchColumns);
}

// Of the product that was started with `params`.
template <class Product>
void launch_shared_sums(const typename Product::Params& params, const WeightGradient& step) {
  using Sums =
      SharedSums<typename Product::Shape, typename Product::Order, typename Product::Epilogue>;
  constexpr int kBatches = PartialSums<typename Product::Shape>::kBatches;
  launch_early<add_shared_sums<Sums>>(
      {.blocks = dim3(static_cast<unsigned>(step.shares - 1), kBatches * 2),
       .threads = kStoringWarps * kWarp,
       .stream = static_cast<cudaStream_t>(step.stream)},
      Sums{.order = params.order, .epilogue = params.epilogue});
}

}  // namespace tilemoe::cuda::sm100
