// H = X W1^T + b1, A = act(H): gathers X while it loads, and finishes A before it stores. One
// instantiation file a type.
#pragma once

#include <type_traits>

#include "cuda/sm90/epilogue_activation.h"
#include "cuda/sm90/epilogue_swiglu.h"
#include "cuda/step/adjacent_up_projection.h"
#include "cuda/step/projection.h"
#include "cuda/step/up_parts.h"

namespace tilemoe::cuda {

template <class Shape, Activations kActivations, Major kMajor, class LoadX = GatheredRows<Shape>>
void run_up_projection(const UpProjection& step) {
  constexpr bool kSwiGLU = kActivations == Activations::kSwiGLU;
  using Epilogue =
      std::conditional_t<kSwiGLU, SwiGLUEpilogue<Shape>, ActivationEpilogue<Shape, kActivations>>;
  using LoadW1 = Weights<Shape, kMajor, Epilogue::kParts>;
  using Gemm = GroupedGemm<Shape, LoadX, LoadW1, Epilogue, RowTilesOf<Shape>>;
  constexpr int kBoxRows = LoadW1::kBoxRows;
  using Element = typename Shape::Element;
  const tilemoe_experts& experts = *step.experts;
  const int64_t n = experts.n, d = experts.d;
  const tilemoe_tensor& W1 = step.weights.W1;
  const tilemoe_tensor& b1 = step.weights.b1;
  const int64_t n_blocks = (n + Epilogue::kColumns - 1) / Epilogue::kColumns;
  const int64_t k_blocks = (d + Shape::BLOCK_K - 1) / Shape::BLOCK_K;

  typename Gemm::Params params{};
  if constexpr (std::is_same_v<LoadX, DenseRows<Shape>>)
    params.a = dense_rows<Shape>(step.X);
  else
    params.a = gathered_rows(step.X, step.rows);
  const auto bias = [&](const tilemoe_tensor& b, int64_t first, int32_t every) -> Bias {
    if (!present(b)) return {};
    return {.data = static_cast<const Element*>(b.data) + first,
            .expert_stride = b.stride[0],
            .column_stride = every,
            .columns = static_cast<int32_t>(n)};
  };
  if constexpr (Epilogue::kParts == 1) {
    params.b.part[0] = weights_map<Shape, kMajor, kBoxRows>(W1, 0, n);
    params.epilogue.bias[0] = bias(b1, 0, 1);
  } else {
    const bool split = experts.gate_layout == TILEMOE_GATE_SPLIT;
    const bool interleaved = experts.gate_layout == TILEMOE_GATE_INTERLEAVED;
    const int32_t every = interleaved ? 2 : 1;
    const int64_t first_up = split ? 0 : interleaved ? 1 : n;
    params.b.part[0] = weights_map<Shape, kMajor, kBoxRows>(W1, 0, n, every);
    params.b.part[1] =
        weights_map<Shape, kMajor, kBoxRows>(split ? step.weights.W1_up : W1, first_up, n, every);
    params.epilogue.bias[0] = bias(b1, 0, every);
    params.epilogue.bias[1] = bias(split ? step.weights.b1_up : b1, first_up, every);
  }
  params.epilogue.H = ragged_output_of<typename Shape::Element>(step.H, Epilogue::kParts, n);
  params.epilogue.A = ragged_output_of<typename Shape::Element>(step.A, 1, n);
  if constexpr (!kSwiGLU) params.epilogue.activation = activation_params(experts);
  params.order = row_tiles<Shape>(step.rows, n_blocks, k_blocks);
  launch<Gemm>(params, row_tiles_at_most<Shape>(step.rows, n_blocks), step.stream,
               step.block_turns);
}

// The one tile that every activation and layout has.
template <class Element>
using AnyTile = TileShape<Element, 128, 256, Schedule::kCooperative>;
template <class Element>
using ClusterTile = TileShape<Element, 128, 256, Schedule::kCooperative, 2>;

template <class Element, Major kMajor>
void run_any_up_projection(const UpProjection& step) {
  if (tilemoe_activation_gated(step.experts->activation))
    run_up_projection<AnyTile<Element>, Activations::kGated, kMajor>(step);
  else
    run_up_projection<AnyTile<Element>, Activations::kPlain, kMajor>(step);
}

template <class Element>
void up_projection(const UpProjection& step) {
  if (major_of(step.weights.W1) == Major::kK)
    run_any_up_projection<Element, Major::kK>(step);
  else if (has_adjacent_columns(*step.experts, step.weights.W1))
    run_adjacent_up_projection<AnyTile<Element>>(step);
  else
    run_any_up_projection<Element, Major::kMN>(step);
}

}  // namespace tilemoe::cuda
