// What a kit's skeleton asks of an order of tiles.
#pragma once

#include <concepts>

#include "cuda/core/tile.h"

namespace tilemoe::cuda {

// Which tile next: next() is called by whole warps and gives every warp of a block the same tiles.
template <class O>
concept TileOrder = requires(O order, const typename O::Params& params, Tile& tile) {
  O(params);
  { order.next(tile) } -> std::same_as<bool>;
};

}  // namespace tilemoe::cuda
