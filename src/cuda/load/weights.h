// Operand B: BLOCK_N columns of the product, which are rows of one expert's weights, by TMA.
// Of a gated activation the tile has two parts, gate rows and then as many up rows, each
// from a map of its own: so gate and up of a column meet in one thread's accumulators, whether they
// lie one after the other, interleaved or in two tensors, and neither spills into the other.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/core/tile.h"
#include "cuda/load/cluster_boxes.h"
#include "cuda/load/weight_box.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/uniform.h"

namespace tilemoe::cuda::load {

template <class Shape, Major kMajor, int kParts>
class Weights {
 public:
  using Operand = StagedOperand<kMajor, Shape::BLOCK_N>;
  static constexpr int kTmaBytes = Operand::kBytes;
  static constexpr int kThreadArrivals = 0;
  // A cluster's blocks bring half of B each where it has halves: three chunks of rows have none.
  static constexpr bool kHasHalves = kMajor == Major::kK || Shape::BLOCK_N % 128 == 0;
  static constexpr int kBoxes = Shape::kCluster == 1 ? kParts
                                : kHasHalves         ? 2
                                                     : Shape::BLOCK_N / 64;
  static_assert(kHasHalves || kParts == 1);
  static constexpr int kBoxRows = Shape::BLOCK_N / kBoxes;
  using Box = WeightBox<kMajor, kBoxRows>;

  struct Params {
    CUtensorMap part[kParts];
  };

  // Of kParts weights (E, columns of the product, sum).
  static Params params(const tilemoe_tensor* weights) {
    Params params{};
    for (int p = 0; p < kParts; ++p) params.part[p] = Box::template map<Shape>(weights[p]);
    return params;
  }

  __device__ Weights(const Params& params, int32_t /*thread*/) : params_(params) {}

  __device__ void prefetch() const {
    for (const CUtensorMap& map : params_.part) ptx::tma_prefetch_map(&map);
  }
  __device__ void begin(const Tile& tile) {
    expert_ = ptx::uniform(tile.expert);
    first_row_ = ptx::uniform(tile.n_block) * (Shape::BLOCK_N / kParts);
    shared_by_cluster_ = tile.shares_b;
  }
  __device__ void load(uint32_t shared, uint32_t full, int32_t k_block) const {
    load_boxes<kBoxes, Shape::kCluster>(*this, shared_by_cluster_, shared, full, k_block);
  }
  template <class Copy>
  __device__ void load_box(Copy copy, int32_t number, uint32_t shared, uint32_t full,
                           int32_t k_block) const {
    const CUtensorMap* map = &params_.part[kParts == 2 ? number : 0];
    const int32_t first_row = first_row_ + (kParts == 2 ? 0 : number * kBoxRows);
    Box::load(copy, shared + number * Box::Operand::kBytes, map, full, first_row,
              k_block * Shape::BLOCK_K, expert_);
  }

 private:
  const Params& params_;
  int32_t expert_, first_row_;
  bool shared_by_cluster_;
};

}  // namespace tilemoe::cuda::load
