// What plugs into the skeleton, and what a part lacks when it does not.
#pragma once

#include <concepts>
#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

// Copies one operand's k blocks to shared memory, as its Operand lays them out. Constructed by every
// thread; begin() is told each tile, copy(shared, k block) starts the thread's own copies, k blocks
// ascending.
template <class L>
concept Loader = requires(L loader, const typename L::Params& params, const Tile& tile,
                          int32_t thread, uint32_t shared, int32_t k_block) {
  { L::Operand::kBytes } -> std::convertible_to<int>;
  L(params, thread);
  loader.begin(tile);
  loader.copy(shared, k_block);
};

// Finishes a tile: store() is called by every warp with its own accumulators, which it may change.
// Warps never wait for each other in it.
template <class E, class Shape>
concept EpilogueOf = requires(E epilogue, const typename E::Params& params, Accumulators<Shape>& D,
                              const Tile& tile) {
  E(params);
  epilogue.store(D, tile);
};

}  // namespace tilemoe::cuda::sm80
