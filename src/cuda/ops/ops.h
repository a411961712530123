// The five GEMMs of the layer: their loaders, epilogue and tile order, for any arch.
#pragma once

#include <type_traits>

#include "core/backend.h"
#include "core/check.h"
#include "cuda/core/gemm_steps.h"
#include "cuda/gemm/schedule/row_tiles.h"  // column_group()
#include "cuda/gemm/schedule/splits.h"
#include "cuda/ops/table.h"

namespace tilemoe::cuda {

template <class Arch, class Shape, class A, class B, class Epilogue>
using ProjectionGemm =
    typename Arch::template Gemm<Shape, A, B, Epilogue, typename Arch::template RowOrder<Shape>>;

// Of `columns` columns, as the epilogue counts them, in `k_blocks` blocks of the sum.
template <class Arch, class Gemm, class Step>
void run_over_rows(typename Gemm::Params& params, const Step& step, int64_t columns,
                   int64_t k_blocks) {
  using Order = typename Gemm::Order;
  constexpr int kColumns = Gemm::Epilogue::kColumns;
  const int64_t n_blocks = (columns + kColumns - 1) / kColumns;
  params.order = Order::params(step.rows, n_blocks, k_blocks, column_group(step.tuning));
  Arch::template launch<Gemm>(params, Order::max_tiles(step.rows, n_blocks), step.stream,
                              step.tuning);
}

template <class Shape>
int64_t k_blocks(int64_t sum) {
  return (sum + Shape::BLOCK_K - 1) / Shape::BLOCK_K;
}

// H = X W1^T + b1, A = act(H): gathers X while it loads, and finishes A before it stores.

// With interleaved gate/up columns in W1, the GEMM has 2n columns like any other, and its epilogue
// computes one column of A from two.
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const UpProjection& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using Epilogue =
      typename Arch::template Activation<Shape, kVariant.activations, kVariant.interleaved_columns>;
  using X = typename Arch::template Rows<Shape, kVariant.gathers>;
  using W1 = typename Arch::template Weights<Shape, kVariant.weights, Epilogue::kParts>;
  using Gemm = ProjectionGemm<Arch, Shape, X, W1, Epilogue>;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& from = step.weights;
  const UpParts weights = up_parts(experts, from.W1, from.W1_up, kVariant.interleaved_columns);
  const UpParts biases = up_parts(experts, from.b1, from.b1_up, kVariant.interleaved_columns);
  typename Gemm::Params params{.a = X::params(step.X, step.rows),
                               .b = W1::params(weights.part),
                               .epilogue = Epilogue::params(step.H, step.A, biases, experts)};
  run_over_rows<Arch, Gemm>(params, step, weights.columns, k_blocks<Shape>(experts.d));
}

// Y = A W2^T + b2.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const DownProjection& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using A = typename Arch::template Rows<Shape, false>;
  using W2 = typename Arch::template Weights<Shape, kVariant.weights, 1>;
  using Epilogue = typename Arch::template Store<Shape, typename Shape::Recipe::Out::Y>;
  using Gemm = ProjectionGemm<Arch, Shape, A, W2, Epilogue>;
  typename Gemm::Params params{.a = A::params(step.A, step.rows),
                               .b = W2::params(&step.W2),
                               .epilogue = Epilogue::params(step.Y, step.b2)};
  run_over_rows<Arch, Gemm>(params, step, step.Y.shape[1], k_blocks<Shape>(step.experts->n));
}

// dA' = dO W2, gathered, and from it and H: dH, A' and the partial sums of ds.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const ActivationGradient& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using dO = typename Arch::template Rows<Shape, true>;
  using W2 = typename Arch::template Weights<Shape, kVariant.weights, 1>;
  using Epilogue = typename Arch::template ActivationGradient<Shape, kVariant.activations>;
  using Gemm = ProjectionGemm<Arch, Shape, dO, W2, Epilogue>;
  const tilemoe_tensor weights = transposed(step.W2);
  typename Gemm::Params params{.a = dO::params(step.dO, step.rows),
                               .b = W2::params(&weights),
                               .epilogue = Epilogue::params(step)};
  run_over_rows<Arch, Gemm>(params, step, step.experts->n, k_blocks<Shape>(step.experts->d));
}

// dX~ = dH W1, summed over gate and up columns of dH.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const InputGradient& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using dH = typename Arch::template PartRows<Shape>;
  using W1 = typename Arch::template WeightsByParts<Shape, kVariant.weights>;
  using Epilogue = typename Arch::template Store<Shape, typename Shape::Recipe::Out::dXRows>;
  using Gemm = ProjectionGemm<Arch, Shape, dH, W1, Epilogue>;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& from = step.weights;
  const UpParts parts =
      up_parts(experts, from.W1, from.W1_up, has_interleaved_columns(experts, from.W1));
  typename Gemm::Params params{.a = dH::params(step.dH, parts.count, parts.columns),
                               .b = W1::params(parts),
                               .epilogue = Epilogue::params(step.dX_rows, {})};
  run_over_rows<Arch, Gemm>(params, step, step.dX_rows.shape[1],
                            parts.count * k_blocks<Shape>(parts.columns));
}

// Both weight gradients: per expert, the sum over its rows of dense^T gathered.

// D is the gradient's transpose, gathered columns by dense columns, so that the wide side of the
// tile is the dense one, which costs no thread's copies and is shared by a cluster.
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const WeightGradient& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using Out = std::conditional_t<kVariant.float_out, float, typename Shape::Recipe::Out::dW>;
  using Gathered = typename Arch::template AGathered<Shape>;
  using Dense = typename Arch::template BDense<Shape>;
  using Epilogue = typename Arch::template WeightGradient<Shape, Out, kVariant.out>;
  using Order = typename Arch::template ExpertOrder<Shape>;
  using Gemm = typename Arch::template Gemm<Shape, Gathered, Dense, Epilogue, Order>;
  const int64_t d = step.gathered.shape[1], E = step.rows.E;
  const ReferenceTiles reference = ReferenceTiles::of(d, step.dense_columns, step.parts);
  TILEMOE_ASSERT(
      reference.m_blocks <= INT32_MAX / (2 * reference.n_blocks * E),  // cuda_backend.cpp
      "the weight gradients of " << E << " experts have too many tiles to count");
  const int64_t tiles = reference.count();
  TILEMOE_ASSERT(step.scratch.bytes >= ExpertRanks::bytes(E, step.splits),
                 step.scratch.bytes << " bytes of scratch for the experts' ranks");
  const ExpertRanks ranks = ExpertRanks::in(step.scratch, E);

  typename Gemm::Params params{.a = Gathered::params(step.gathered, step.rows),
                               .b = Dense::params(step),
                               .epilogue = Epilogue::params(step, ranks.partial_sums),
                               .order = {.long_tiles = {.ranked = ranks.ranked,
                                                        .long_experts = ranks.long_experts,
                                                        .tiles = static_cast<int32_t>(tiles),
                                                        .max_splits = step.splits},
                                         .E = static_cast<int32_t>(E),
                                         .reference = reference}};
  rank_experts(device_of(step.tuning.plan), step.rows, ranks, tiles, step.splits, step.stream);
  Arch::template launch<Gemm>(params, E * tiles + step.splits, step.stream, step.tuning);
  if (step.splits >= 2) Arch::template reduce_splits<Gemm>(params, step);
}

}  // namespace tilemoe::cuda
