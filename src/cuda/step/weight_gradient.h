// Both weight gradients: per expert, the sum over its rows of dense^T gathered.
#pragma once

#include <type_traits>

#include "check.h"
#include "cuda/schedule/expert_ranks.h"
#include "cuda/schedule/reference_tiles.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

// D is the gradient's transpose, gathered columns by dense columns, so that the wide side of the
// tile is the dense one, which costs no thread's copies and is shared by a cluster.
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const WeightGradient& step) {
  using Shape = typename Kit::template Shape<kVariant, kTile>;
  using Out = std::conditional_t<kVariant.float_out, float, typename Shape::Out>;
  using Gathered = typename Kit::template SummedGathered<Shape>;
  using Dense = typename Kit::template SummedDense<Shape>;
  using Epilogue = typename Kit::template WeightGradient<Shape, Out, kVariant.out>;
  using Order = typename Kit::template ExpertOrder<Shape>;
  using Product = typename Kit::template Product<Shape, Gathered, Dense, Epilogue, Order>;
  const int64_t d = step.gathered.shape[1], E = step.rows.E;
  const ReferenceTiles reference = ReferenceTiles::of(d, step.dense_columns, step.parts);
  TILEMOE_ASSERT(reference.m_blocks <= INT32_MAX / (2 * reference.n_blocks * E),  // call_limits.h
                 "the weight gradients of " << E << " experts have too many tiles to count");
  const int64_t tiles = reference.count();
  TILEMOE_ASSERT(step.scratch.bytes >= ExpertRanks::bytes(E, step.shares),
                 step.scratch.bytes << " bytes of scratch for the experts' ranks");
  const ExpertRanks ranks = ExpertRanks::in(step.scratch, E);

  typename Product::Params params{.a = Gathered::params(step.gathered, step.rows),
                                  .b = Dense::params(step),
                                  .epilogue = Epilogue::params(step, ranks.partial_sums),
                                  .order = {.long_tiles = {.ranked = ranks.ranked,
                                                           .long_experts = ranks.long_experts,
                                                           .tiles = static_cast<int32_t>(tiles),
                                                           .most_shares = step.shares},
                                            .E = static_cast<int32_t>(E),
                                            .reference = reference}};
  rank_experts(step.rows, ranks, tiles, step.shares, step.stream);
  Kit::template launch<Product>(params, E * tiles + step.shares, step.stream, step.tuning);
  if (step.shares >= 2) Kit::template add_shared_sums<Product>(params, step);
}

}  // namespace tilemoe::cuda
