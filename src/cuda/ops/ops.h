// The GEMMs of the layer and of its adapters: their loaders, epilogue and tile order, for any arch.
#pragma once

#include <type_traits>

#include "core/check.h"
#include "core/step_arguments.h"
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

// A projection whose step may have an adapter: the k blocks of the adapter's rows and factor then
// follow those of A and B. B's columns have kParts parts.
template <class Arch, Variant kVariant, class Shape, class A, class B, class Epilogue,
          int kParts = 1>
struct Projection {
  using AdapterShape = typename Arch::template AdapterShape<Shape>;
  using AdapterRows = typename Arch::template AdapterRows<AdapterShape, A>;
  using Factor = typename Arch::template Weights<AdapterShape, kVariant.weights, kParts>;
  template <class First, class Second>
  using Source =
      std::conditional_t<kVariant.adapter,
                         typename Arch::template Chained<First, Second, kVariant.weights, Epilogue>,
                         First>;
  using LoadA = Source<A, AdapterRows>;
  using LoadB = Source<B, Factor>;
  using Gemm = ProjectionGemm<Arch, Shape, LoadA, LoadB, Epilogue>;

  // `columns`: of a part.
  template <class Step>
  static void run(const Step& step, const typename A::Params& a, const typename B::Params& b,
                  const typename Epilogue::Params& epilogue, int64_t columns, int64_t blocks) {
    const Adapter& adapter = step.adapter;
    TILEMOE_ASSERT(
        present(adapter.rows) == kVariant.adapter || writes_A_twice(step),
        "the kernel is for a step " << (kVariant.adapter ? "with" : "without") << " an adapter");
    typename Gemm::Params params{.epilogue = epilogue};
    if constexpr (kVariant.adapter && is_fp8(kVariant.recipe))
      if (!present(adapter.rows)) {  // no k block reads the second source
        params.a.first = a, params.b.first = b;
        for (int p = 0; p < kParts; ++p) params.b.second.part[p] = b.part[p];
        params.a.first_blocks = params.b.first_blocks = static_cast<int32_t>(blocks);
        return run_over_rows<Arch, Gemm>(params, step, columns, blocks);
      }
    if constexpr (kVariant.adapter) {
      const int64_t rank = adapter.rows.shape[1];
      Rows in_order = step.rows;
      in_order.token = nullptr;
      tilemoe_tensor factor[kParts];
      for (int p = 0; p < kParts; ++p) factor[p] = rows_of(adapter.factor, p * columns, columns, 1);
      params.a = LoadA::params(a, blocks, AdapterRows::params(adapter.rows, in_order), rank,
                               AdapterShape::BLOCK_K);
      params.b = LoadB::params(b, blocks, Factor::params(factor), rank, AdapterShape::BLOCK_K);
      blocks += k_blocks<AdapterShape>(rank);
    } else {
      params.a = a, params.b = b;
    }
    run_over_rows<Arch, Gemm>(params, step, columns, blocks);
  }
};

// Operand B of a projection: values of weights, or codes on the arches that read them.
template <class Arch, Variant kVariant, class Shape, int kParts>
struct ProjectedWeights {
  using type = typename Arch::template Weights<Shape, kVariant.weights, kParts>;
};
template <class Arch, Variant kVariant, class Shape, int kParts>
requires(kVariant.codes) struct ProjectedWeights<Arch, kVariant, Shape, kParts> {
  using type = typename Arch::template Codes<Shape, kParts>;
};

// Operand A of a projection: rows of values, or of codes in the fp8 recipe.
template <class Load>
typename Load::Params rows_params(const Rows& rows, const tilemoe_tensor& values,
                                  const Fp8Rows& codes, int64_t count, int64_t columns,
                                  const int32_t* token) {
  if constexpr (requires { typename Load::Codes; })
    return Load::params(codes, count, columns, token);
  else
    return Load::params(values, rows);
}

// The epilogue of the up-projection.
template <class Arch, Variant kVariant, class Shape>
struct UpEpilogue {
  using type =
      typename Arch::template Activation<Shape, kVariant.activations, kVariant.interleaved_columns>;
};
template <class Arch, Variant kVariant, class Shape>
requires(is_fp8(kVariant.recipe) && kVariant.adapter) struct UpEpilogue<Arch, kVariant, Shape> {
  using type = typename Arch::template ActivationInBoth<Shape, kVariant.activations>;
};

// H = X W1^T + b1, A = act(H): gathers X while it loads, and finishes A before it stores.

// With interleaved gate/up columns in W1, the GEMM has 2n columns like any other, and its epilogue
// computes one column of A from two.
template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const UpProjection& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using Epilogue = typename UpEpilogue<Arch, kVariant, Shape>::type;
  using X = typename Arch::template Rows<Shape, kVariant.gathers>;
  using W1 = typename ProjectedWeights<Arch, kVariant, Shape, Epilogue::kParts>::type;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& from = step.weights;
  const UpParts weights = up_parts(experts, from.W1, from.W1_up, kVariant.interleaved_columns);
  const UpParts biases = up_parts(experts, from.b1, from.b1_up, kVariant.interleaved_columns);
  typename W1::Params of_W1;
  if constexpr (kVariant.codes)
    of_W1 = W1::params(step.codes, experts, up_code_rows(experts), experts.d);
  else
    of_W1 = W1::params(weights.part);
  typename Epilogue::Params outputs;
  if constexpr (is_fp8(kVariant.recipe))
    outputs = Epilogue::params(step, biases);
  else
    outputs = Epilogue::params(step.H, step.A, biases, experts);
  Projection<Arch, kVariant, Shape, X, W1, Epilogue, Epilogue::kParts>::run(
      step,
      rows_params<X>(step.rows, step.X, step.X_codes, step.X.shape[0], experts.d, step.rows.token),
      of_W1, outputs, weights.columns, k_blocks<Shape>(experts.d));
}

// Y = A W2^T + b2.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const DownProjection& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using A = typename Arch::template Rows<Shape, false>;
  using W2 = typename ProjectedWeights<Arch, kVariant, Shape, 1>::type;
  using Epilogue = typename Arch::template Store<Shape, typename Shape::Recipe::Out::Y>;
  typename W2::Params of_W2;
  if constexpr (kVariant.codes)
    of_W2 = W2::params(step.codes, *step.experts, down_code_rows(step), step.experts->n);
  else
    of_W2 = W2::params(&step.W2);
  Projection<Arch, kVariant, Shape, A, W2, Epilogue>::run(
      step,
      rows_params<A>(step.rows, step.A, step.A_codes, step.rows.capacity, step.experts->n, nullptr),
      of_W2, Epilogue::params(step.Y, step.b2), step.Y.shape[1], k_blocks<Shape>(step.experts->n));
}

template <class Epilogue>
constexpr bool writes_dH_codes() {
  if constexpr (requires { Epilogue::kWritesCodes; }) return Epilogue::kWritesCodes;
  return false;
}

// dA' = dO W2, gathered, and from it and H: dH, A' and the partial sums of ds.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const ActivationGradient& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using dO = typename Arch::template Rows<Shape, true>;
  using W2 = typename ProjectedWeights<Arch, kVariant, Shape, 1>::type;
  using Epilogue = typename Arch::template ActivationGradient<Shape, kVariant.activations>;
  const tilemoe_experts& experts = *step.experts;
  TILEMOE_ASSERT(!step.dH_codes.given() || (kVariant.codes && writes_dH_codes<Epilogue>()),
                 "a kernel that writes no codes of dH");
  typename W2::Params of_W2;
  if constexpr (kVariant.codes) {
    TILEMOE_ASSERT(step.codes.weight.transposed != 0, "codes of W2, expected its transpose's");
    of_W2 = W2::params(step.codes, experts, activation_code_rows(step), experts.d);
  } else {
    const tilemoe_tensor weights = transposed(step.W2);
    of_W2 = W2::params(&weights);
  }
  Projection<Arch, kVariant, Shape, dO, W2, Epilogue>::run(
      step,
      rows_params<dO>(step.rows, step.dO, step.dO_codes, step.dO.shape[0], experts.d,
                      step.rows.token),
      of_W2, Epilogue::params(step), experts.n, k_blocks<Shape>(experts.d));
}

// dX~ = dH W1, summed over gate and up columns of dH.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const InputGradient& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using dH = typename Arch::template PartRows<Shape>;
  using W1 = typename Arch::template WeightsByParts<Shape, kVariant.weights>;
  using Epilogue = typename Arch::template Store<Shape, typename Shape::Recipe::Out::dXRows>;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& from = step.weights;
  const UpParts parts =
      up_parts(experts, from.W1, from.W1_up, has_interleaved_columns(experts, from.W1));
  typename dH::Params of_dH;
  typename W1::Params of_W1;
  if constexpr (kVariant.codes) {
    TILEMOE_ASSERT(step.codes.weight.transposed != 0, "codes of W1, expected its transpose's");
    of_dH = dH::params(step.dH_codes, parts.count, step.rows.capacity, parts.columns);
    of_W1 = W1::params(step.codes, experts, input_code_rows(step));
  } else {
    of_dH = dH::params(step.dH, parts.count, parts.columns);
    of_W1 = W1::params(parts);
  }
  Projection<Arch, kVariant, Shape, dH, W1, Epilogue>::run(
      step, of_dH, of_W1, Epilogue::params(step.dX_rows, {}), step.dX_rows.shape[1],
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

// P or Q = source factor^T of low-rank adapters. The bytes of `source` limit its speed: with a
// narrow tile the ring has more stages of them in flight.

template <class Arch, Variant kVariant, TileConfiguration kTile>
void run(const LoraProjection& step) {
  using Shape = typename Arch::template Shape<kVariant, kTile>;
  using Source = typename Arch::template Rows<Shape, kVariant.gathers>;
  using Factor = typename Arch::template Weights<Shape, kVariant.weights, 1>;
  using Epilogue = typename Arch::template Store<Shape, typename Shape::Element>;
  using Gemm = ProjectionGemm<Arch, Shape, Source, Factor, Epilogue>;
  typename Gemm::Params params{.a = Source::params(step.source, step.rows),
                               .b = Factor::params(&step.factor),
                               .epilogue = Epilogue::params(step.out, {})};
  run_over_rows<Arch, Gemm>(params, step, step.out.shape[1], k_blocks<Shape>(step.source.shape[1]));
}

}  // namespace tilemoe::cuda
