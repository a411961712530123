// The up-projection's end (epilogue/slab_activation.h), slab by slab.
#pragma once

#include <cstdint>

#include "cuda/core/tile.h"
#include "cuda/epilogue/slab_activation.h"
#include "cuda/sm80/each_slab.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

// A warp's columns are the parts that a slab has.
template <class Shape, Activations kActivations, bool kAdjacent, SlabStore Rows>
class ActivationEpilogue {
 public:
  using Slab = SlabActivation<Shape, kActivations, kAdjacent, Rows>;
  static constexpr int kParts = Slab::kParts;
  static constexpr int kColumns = Shape::BLOCK_N / kParts;  // of a part

  using Params = typename Slab::Params;
  static Params params(const tilemoe_tensor& H, const tilemoe_tensor& A, const UpParts& biases,
                       const tilemoe_experts& experts) {
    return Slab::params(H, A, biases, experts);
  }

  __device__ explicit ActivationEpilogue(const Params& params) : slab_(params) {}

  __device__ bool wants(const Tile& tile) const {
    return tile.n_block * kColumns + Shape::slab_column() / kParts < slab_.columns() &&
           tile.row_begin + Shape::slab_row(0) < tile.row_end;
  }

  __device__ __forceinline__ void store(Accumulators<Shape>& D, const Tile& tile) const {
    const int32_t column = tile.n_block * kColumns + Shape::slab_column() / kParts;
    for_each_slab<Shape>(D, [&](int m, OneSlab<Shape>& slab) {
      if (tile.row_begin + Shape::slab_row(m) >= tile.row_end) return false;
      slab_.finish(m, tile, column, slab);
      return true;
    });
  }

 private:
  Slab slab_;
};

}  // namespace tilemoe::cuda::sm80
