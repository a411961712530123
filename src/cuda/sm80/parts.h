// What plugs into the skeleton, and what a part lacks when it does not.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/sm80/mma.h"

namespace tilemoe::cuda::sm80 {

// Copies one operand's k blocks to shared memory, as its Operand lays them out. Constructed by every
// thread; begin() is told each tile, copy(shared, blocks left) starts the thread's own copies of the
// tile's first k block, and after each advance(blocks left) of the next. The k blocks that are left
// of the tile include the one that is copied, or left behind. They stand among the products, so they
// are as few instructions as can be: addresses move on from k block to k block, and each copy has
// one condition.
template <class L>
concept Loader = requires(L loader, const typename L::Params& params, const Tile& tile,
                          int32_t thread, uint32_t shared, int32_t blocks_left) {
  { L::Operand::kBytes } -> std::convertible_to<int>;
  L(params, thread);
  loader.begin(tile);
  loader.copy(shared, blocks_left);
  loader.advance(blocks_left);
};

// Finishes a tile: store() is called by every warp with its own accumulators, which it may change.
// Warps never wait for each other in it. Where all of a warp's part of the tile lies past the last
// row or column, wants() is false, and its accumulators are zeros.
template <class E, class Shape>
concept EpilogueOf = requires(E epilogue, const typename E::Params& params, Accumulators<Shape>& D,
                              const Tile& tile) {
  E(params);
  { epilogue.wants(tile) } -> std::convertible_to<bool>;
  epilogue.store(D, tile);
};

}  // namespace tilemoe::cuda::sm80
