// A tile's end, slab by slab, as a loop: written out for all of a warp's slabs it is some 90 KiB of
// instructions for a gated activation's gradient, which a multiprocessor fetches anew for each tile.
#pragma once

#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

// A warp's slab, as what works on several takes it.
template <class Shape>
using OneSlab = Slabs<1, Shape::kWarpColumns>;

// Calls body(m, slab m) of each; false ends it. The others move up by one, since registers have
// constant numbers, so D is lost.
template <class Shape, class Body>
__device__ __forceinline__ void for_each_slab(Accumulators<Shape>& D, const Body& body) {
#pragma unroll 1
  for (int m = 0; m < Shape::kSlabs; ++m) {
    if (!body(m, reinterpret_cast<OneSlab<Shape>&>(D[0]))) return;
#pragma unroll
    for (int later = 1; later < Shape::kSlabs; ++later)
#pragma unroll
      for (int i = 0; i < Shape::kWarpColumns / 2; ++i) D[later - 1][i] = D[later][i];
  }
}

}  // namespace tilemoe::cuda::sm80
