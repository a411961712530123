// What plugs into the skeleton beside loaders (load/loader.h), and what a part lacks when it does
// not.
#pragma once

#include "cuda/core/tile.h"
#include "cuda/sm100/warp_accumulators.h"

namespace tilemoe::cuda::sm100 {

// Finishes a tile: store() is called by every storing warp with its own rows, of which it pulls what
// it needs. Warps never wait for each other in it.
template <class E>
concept Epilogue = requires(const E epilogue, const typename E::Params& params,
                            const WarpAccumulators& D, const Tile& tile) {
  E(params);
  epilogue.store(D, tile);
};

}  // namespace tilemoe::cuda::sm100
