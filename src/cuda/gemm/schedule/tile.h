// A tile, as a tile order passes it to the roles: the next part of the GEMM of an expert.
#pragma once

#include <concepts>
#include <cstdint>

namespace tilemoe::cuda {

struct Tile {
  int32_t expert;
  int32_t row_begin;  // first row of the tile, or of its sum, counted over all experts
  int32_t row_end;    // end of the expert's rows; the tile may reach past it
  int32_t n_block;
  int32_t k_blocks;     // at least 1
  int32_t m_block = 0;  // where rows are summed over: the row block of the tile in the GEMM
  // All CTAs of the cluster have this expert and n_block, and so the same B. They always have the
  // same k_blocks.
  bool multicast_b = false;
  // Where the tile's sum is one part of an expert's: which place among the partial sums it has.
  int32_t partial_sum = -1;
};

// ---- what a chapter requires of a tile order

// The next tile: next() is called by whole warps and returns the same tiles to every warp of a CTA.
template <class O>
concept TileOrder = requires(O order, const typename O::Params& params, Tile& tile) {
  O(params);
  { order.next(tile) } -> std::same_as<bool>;
};

}  // namespace tilemoe::cuda
