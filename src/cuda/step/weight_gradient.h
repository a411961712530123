// Both weight gradients: per expert, the sum over its rows of dense^T gathered. One instantiation
// file a type; the two steps share their kernels.
#pragma once

#include "cuda/epilogue/weight_gradient.h"
#include "cuda/load/summed_rows.h"
#include "cuda/schedule/expert_tiles.h"
#include "cuda/step/projection.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

// D is the gradient's transpose, gathered columns by dense columns, so that the wide side of the
// tile is the dense one, which costs no thread's copies and is shared by a cluster.
template <class Shape, class Out, Lies kLies>
void run_weight_gradient(const WeightGradientProduct& product) {
  using Element = typename Shape::Element;
  using LoadGathered = GatheredSummedRows<Shape>;
  using LoadDense = DenseSummedRows<Shape>;
  using Epilogue = WeightGradientEpilogue<Shape, Out, kLies>;
  using Order = ExpertTiles<Shape::BLOCK_K, Shape::kCluster>;
  using Gemm = GroupedGemm<Shape, LoadGathered, LoadDense, Epilogue, Order>;
  constexpr int64_t kStepRows = Shape::BLOCK_M * Shape::kCluster;
  const int64_t n = product.dense_columns, d = product.gathered.shape[1];
  const int64_t blocks_a_part = (n + Shape::BLOCK_N - 1) / Shape::BLOCK_N;

  typename Gemm::Params params{};
  params.a = gathered_rows(product.gathered, product.rows);
  params.b.blocks_a_part = params.epilogue.blocks_a_part = static_cast<int32_t>(blocks_a_part);
  params.epilogue.rows = static_cast<int32_t>(d);
  params.epilogue.columns = static_cast<int32_t>(n);
  params.epilogue.accumulate = product.accumulate;
  for (int p = 0; p < product.parts; ++p) {
    const auto& part = product.part[p];
    // Without rows there may be no dense matrix, and none is read; a map has an address all the
    // same.
    const auto* const matrix =
        static_cast<const Element*>(product.rows.capacity > 0 ? product.dense.data : part.out.data);
    params.b.part[p] = make_ragged_map({.dtype = kDTypeOf<Element>,
                                        .data = matrix + part.dense_first,
                                        .columns = n,
                                        .rows = product.rows.capacity,
                                        .row_stride = product.dense.stride[0],
                                        .box = {64, Shape::BLOCK_K}});
    const tilemoe_tensor& out = part.out;  // (E, n, d)
    const int64_t stride = kLies == Lies::kTransposed ? out.stride[1] : out.stride[2];
    auto& to = params.epilogue.part[p];
    to.data = static_cast<Out*>(out.data);
    to.expert_stride = out.stride[0];
    to.stride = stride;
    if constexpr (!Epilogue::kFloat)
      to.out.map = make_tensor_map({.dtype = kDTypeOf<Element>,
                                    .data = out.data,
                                    .size = {kLies == Lies::kTransposed ? d : n, out.shape[0],
                                             kLies == Lies::kTransposed ? n : d},
                                    .stride = {out.stride[0], stride},
                                    .box = {64, 1, Epilogue::kBoxRows}});
  }
  if (product.parts == 1) params.b.part[1] = params.b.part[0];
  const int64_t m_steps = (d + kStepRows - 1) / kStepRows;
  const int64_t n_blocks = product.parts * blocks_a_part;
  TILEMOE_CHECK_SUPPORTED(
      m_steps <= INT32_MAX / (2 * n_blocks * product.rows.E),
      "the weight gradients of " << product.rows.E << " experts have too many tiles to count");
  params.order = {.offsets = product.rows.offsets,
                  .E = static_cast<int32_t>(product.rows.E),
                  .m_steps = static_cast<int32_t>(m_steps),
                  .n_blocks = static_cast<int32_t>(n_blocks),
                  .n_group = std::min(kColumnGroup, static_cast<int32_t>(n_blocks))};
  launch<Gemm>(params, product.rows.E * m_steps * n_blocks, product.stream);
}

template <class Element, class Out>
void run_weight_gradient_along(const WeightGradientProduct& product) {
  using Pairs = TileShape<Element, 128, 256, Schedule::kCooperative, 2>;
  if (product.part[0].out.stride[2] == 1)
    run_weight_gradient<Pairs, Out, Lies::kTransposed>(product);
  else
    run_weight_gradient<Pairs, Out, Lies::kRows>(product);
}

template <class Element>
void weight_gradient(const WeightGradientProduct& product) {
  if (product.part[0].out.dtype == TILEMOE_FLOAT32)
    run_weight_gradient_along<Element, float>(product);
  else
    run_weight_gradient_along<Element, Element>(product);
}

}  // namespace tilemoe::cuda
