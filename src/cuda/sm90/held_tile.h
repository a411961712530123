// A consumer's tile in 16 bits, in registers: rounded when its products are done, stored beside the
// next tile's.
#pragma once

#include <cstdint>

#include "cuda/core/pack.h"
#include "cuda/ptx/pin.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

template <class Shape>
struct HeldTile {
  // [subtile][j][half] has accumulators 4 j + 2 half and the next.
  uint32_t words[Shape::kSlabs][Shape::BLOCK_N / 8][2];

  __device__ __forceinline__ void round(const Accumulators<Shape>& D) {
#pragma unroll
    for (int m = 0; m < Shape::kSlabs; ++m)
#pragma unroll
      for (int j = 0; j < Shape::BLOCK_N / 8; ++j)
#pragma unroll
        for (int half = 0; half < 2; ++half)
          ptx::pin(words[m][j][half] = pack(D[m][4 * j + 2 * half], D[m][4 * j + 2 * half + 1],
                                            typename Shape::Out()));
  }
};

}  // namespace tilemoe::cuda::sm90
