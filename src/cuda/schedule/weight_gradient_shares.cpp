#include "cuda/schedule/weight_gradient_shares.h"

#include <algorithm>

#include "cuda/schedule/cost.h"
#include "cuda/schedule/expert_ranks.h"

namespace tilemoe::cuda {
namespace {

int64_t blocks(int64_t size, int64_t block) {
  return (size + block - 1) / block;
}

}  // namespace

int32_t weight_gradient_shares(const WeightGradientSize& size, int multiprocessors) {
  constexpr TileConfiguration kTile{128, 256, Schedule::kCooperative, 2};
  const int64_t n_blocks =
      size.parts * blocks(size.dense_columns, column_block(size.dense_columns));
  const int64_t tiles = expert_tiles(blocks(size.d, kTile.block_m), n_blocks, kTile.cluster);
  return shares_at_most(tiles, size.capacity, std::min(size.of_an_expert, size.capacity),
                        multiprocessors / kTile.cluster);
}

int32_t weight_gradient_shares(Step step, const tilemoe_experts& experts, const ScratchSizes& sizes,
                               int multiprocessors) {
  const auto shares = [&](int64_t dense_columns, int parts) {
    return weight_gradient_shares({.dense_columns = dense_columns,
                                   .parts = parts,
                                   .d = experts.d,
                                   .capacity = sizes.capacity,
                                   .of_an_expert = sizes.rows_of_an_expert},
                                  multiprocessors);
  };
  const int64_t n = experts.n;
  if (step == Step::kWeightGradient2 || !tilemoe_activation_gated(experts.activation))
    return shares(n, 1);
  switch (experts.gate_layout) {
    case TILEMOE_GATE_CONCATENATED: return shares(n, 2);
    // Two parts, or one where gate and up lie in adjacent columns: the weight's strides tell.
    case TILEMOE_GATE_INTERLEAVED: return std::max(shares(n, 2), shares(2 * n, 1));
    case TILEMOE_GATE_SPLIT: break;
  }
  // Of two that may be asked for one alone may be.
  return sizes.dW1 && sizes.dW1_up ? std::max(shares(n, 2), shares(n, 1)) : shares(n, 1);
}

}  // namespace tilemoe::cuda
