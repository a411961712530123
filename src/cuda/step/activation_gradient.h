// dA' = dO W2, gathered, and from it and H: dH, A' and the partial sums of ds. One instantiation
// file a type and tile, and one for plain SwiGLU.
#pragma once

#include "cuda/sm90/epilogue_activation_gradient.h"
#include "cuda/step/projection.h"
#include "cuda/step/steps.h"
#include "cuda/step/up_parts.h"

namespace tilemoe::cuda {

template <class Shape, Activations kActivations, Major kMajor>
void run_activation_gradient(const ActivationGradient& step) {
  using Epilogue = ActivationGradientEpilogue<Shape, kActivations>;
  using LoadW2 = Weights<Shape, kMajor, 1>;
  using Gemm = GroupedGemm<Shape, GatheredRows<Shape>, LoadW2, Epilogue, RowTilesOf<Shape>>;
  const int64_t n = step.experts->n, d = step.experts->d;
  const int64_t n_blocks = (n + Shape::BLOCK_N - 1) / Shape::BLOCK_N;
  const int64_t k_blocks = (d + Shape::BLOCK_K - 1) / Shape::BLOCK_K;

  typename Gemm::Params params{};
  params.a = gathered_rows(step.dO, step.rows);
  params.b.part[0] = weights_map<Shape, kMajor, LoadW2::kBoxRows>(transposed(step.W2), 0, n);
  const bool adjacent = has_adjacent_columns(*step.experts, step.W1);
  const int64_t parts = adjacent ? 1 : Epilogue::kParts;
  const int64_t columns = Epilogue::kParts * n / parts;
  using Element = typename Shape::Element;
  params.epilogue.H = ragged_map<Element>(step.H, parts, columns, Shape::BLOCK_M);
  params.epilogue.dH = ragged_output_of<Element>(step.dH, parts, columns);
  params.epilogue.A_scaled = ragged_output_of<Element>(step.A_scaled, 1, n);
  params.epilogue.score = step.rows.score;
  params.epilogue.ds_partial = step.ds_partial;
  params.epilogue.capacity = step.rows.capacity;
  params.epilogue.n = static_cast<int32_t>(n);
  params.epilogue.adjacent = adjacent;
  params.epilogue.activation = activation_params(*step.experts);
  params.order = row_tiles<Shape>(step.rows, n_blocks, k_blocks);
  launch<Gemm>(params, row_tiles_at_most<Shape>(step.rows, n_blocks), step.stream,
               step.block_turns);
}

template <class Element, int kColumns, int kCluster = 1>
using ActivationGradientTile = TileShape<Element, 128, kColumns, Schedule::kCooperative, kCluster>;

template <class Shape, Activations kActivations>
void run_activation_gradient_along(const ActivationGradient& step) {
  if (step.W2.stride[2] == 1)
    run_activation_gradient<Shape, kActivations, Major::kMN>(step);
  else
    run_activation_gradient<Shape, kActivations, Major::kK>(step);
}

template <class Shape>
void run_any_activation_gradient(const ActivationGradient& step) {
  if (tilemoe_activation_gated(step.experts->activation))
    run_activation_gradient_along<Shape, Activations::kGated>(step);
  else
    run_activation_gradient_along<Shape, Activations::kPlain>(step);
}

template <class Element, int kColumns>
void activation_gradient(const ActivationGradient& step) {
  constexpr int kCluster = kColumns == 192 ? 2 : 1;
  run_any_activation_gradient<ActivationGradientTile<Element, kColumns, kCluster>>(step);
}

}  // namespace tilemoe::cuda
