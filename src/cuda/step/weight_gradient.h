// Both weight gradients: per expert, the sum over its rows of dense^T gathered. One instantiation
// file a type and tile; the two steps share their kernels.
#pragma once

#include "cuda/schedule/expert_ranks.h"
#include "cuda/schedule/expert_tiles.h"
#include "cuda/sm90/epilogue_weight_gradient.h"
#include "cuda/sm90/load_summed_rows.h"
#include "cuda/sm90/shared_sums.h"
#include "cuda/step/projection.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

// `column_blocks` blocks of the epilogue's columns are what a part has.
template <class Epilogue, class Element>
typename Epilogue::Params gradient_outputs(const WeightGradientProduct& product,
                                           int64_t column_blocks) {
  using Out = typename Epilogue::Element;
  constexpr bool kTransposed = Epilogue::kTransposed;
  const int64_t n = product.dense_columns, d = product.gathered.shape[1];
  typename Epilogue::Params params{};
  params.rows = static_cast<int32_t>(d);
  params.columns = static_cast<int32_t>(n);
  params.blocks_a_part = static_cast<int32_t>(column_blocks);
  params.accumulate = product.accumulate;
  for (int p = 0; p < product.parts; ++p) {
    const tilemoe_tensor& out = product.part[p].out;  // (E, n, d)
    const int64_t stride = kTransposed ? out.stride[1] : out.stride[2];
    auto& to = params.part[p];
    to.data = static_cast<Out*>(out.data);
    to.expert_stride = out.stride[0];
    to.stride = stride;
    if constexpr (Epilogue::kFloat) continue;
    if constexpr (kTransposed)
      to.out = make_tensor_map({.dtype = kDTypeOf<Element>,
                                .data = out.data,
                                .size = {d, out.shape[0], n},
                                .stride = {out.stride[0], stride},
                                .box = {64, 1, Epilogue::Store::kBatchColumns}});
    else
      to.out = {.map = make_ragged_parts_map({.dtype = kDTypeOf<Element>,
                                              .data = out.data,
                                              .columns = n,
                                              .rows = d,
                                              .row_stride = stride,
                                              .box = {kStoreColumns, kStoreRows}},
                                             {.count = out.shape[0], .stride = out.stride[0]}),
                .columns = params.columns};
  }
  return params;
}

template <class Shape>
typename DenseSummedRows<Shape>::Params summed_rows(const WeightGradientProduct& product,
                                                    int64_t blocks_a_part) {
  using Element = typename Shape::Element;
  typename DenseSummedRows<Shape>::Params params{};
  params.blocks_a_part = static_cast<int32_t>(blocks_a_part);
  for (int p = 0; p < product.parts; ++p) {
    const auto& part = product.part[p];
    // Without rows there may be no dense matrix, and none is read; a map has an address all the
    // same.
    const auto* const matrix =
        static_cast<const Element*>(product.rows.capacity > 0 ? product.dense.data : part.out.data);
    params.part[p] = make_ragged_map({.dtype = kDTypeOf<Element>,
                                      .data = matrix + part.dense_first,
                                      .columns = product.dense_columns,
                                      .rows = product.rows.capacity,
                                      .row_stride = product.dense.stride[0],
                                      .box = {64, Shape::BLOCK_K}});
  }
  if (product.parts == 1) params.part[1] = params.part[0];
  return params;
}

// D is the gradient's transpose, gathered columns by dense columns, so that the wide side of the
// tile is the dense one, which costs no thread's copies and is shared by a cluster.
template <class Shape, class Out, OutputMajor kMajor>
void run_weight_gradient(const WeightGradientProduct& product) {
  using Element = typename Shape::Element;
  using Epilogue = WeightGradientEpilogue<Shape, Out, kMajor>;
  using Order = ExpertTiles<Shape::BLOCK_K>;
  using Gemm =
      GroupedGemm<Shape, GatheredSummedRows<Shape>, DenseSummedRows<Shape>, Epilogue, Order>;
  using Sums = PartialSums<Shape>;
  static_assert(Shape::BLOCK_M == ReferenceTiles::kRows && Shape::kCluster == 2);
  const int64_t n = product.dense_columns, d = product.gathered.shape[1], E = product.rows.E;
  TILEMOE_ASSERT(Shape::BLOCK_N == column_block(n), "a block's tile is half of a reference tile");
  const ReferenceTiles reference = ReferenceTiles::of(d, n, product.parts);
  const int64_t blocks_a_part = reference.n_blocks / product.parts;
  TILEMOE_CHECK_SUPPORTED(
      reference.m_blocks <= INT32_MAX / (2 * reference.n_blocks * E),
      "the weight gradients of " << E << " experts have too many tiles to count");
  const int64_t tiles = reference.count();
  const int32_t shares = weight_gradient_shares(product);
  TILEMOE_ASSERT(product.scratch.bytes >= ExpertRanks::bytes(E, shares),
                 product.scratch.bytes << " bytes of scratch for the experts' ranks");
  const ExpertRanks ranks = ExpertRanks::in(product.scratch, E);
  const Sums sums{static_cast<float4*>(ranks.partial_sums)};

  typename Gemm::Params params{
      .a = gathered_rows(product.gathered, product.rows),
      .b = summed_rows<Shape>(product, blocks_a_part),
      .epilogue = gradient_outputs<Epilogue, Element>(product, blocks_a_part),
      .order = {.long_tiles = {.ranked = ranks.ranked,
                               .long_experts = ranks.long_experts,
                               .tiles = static_cast<int32_t>(tiles),
                               .shares_at_most = shares},
                .E = static_cast<int32_t>(E),
                .reference = reference}};
  params.epilogue.partial_sums = sums;
  rank_experts(product.rows, ranks, tiles, shares, product.stream);
  launch<Gemm>(params, E * tiles + shares, product.stream, product.block_turns);
  if (shares < 2) return;
  using SliceShape = TileShape<Element, Shape::BLOCK_M, Sums::kSlice, Shape::kSchedule>;
  using SliceEpilogue = WeightGradientEpilogue<SliceShape, Out, kMajor>;
  launch_early(
      add_shared_sums<Shape, Order, SliceEpilogue>,
      dim3(static_cast<unsigned>(shares - 1), Sums::kSlices * 2), kBlockThreads, 0,
      static_cast<cudaStream_t>(product.stream),
      SharedSums<Shape, Order, SliceEpilogue>{.order = params.order,
                                              .epilogue = gradient_outputs<SliceEpilogue, Element>(
                                                  product, blocks_a_part * Sums::kSlices),
                                              .partial_sums = sums});
}

template <class Shape, class Out>
void run_weight_gradient_along(const WeightGradientProduct& product) {
  if (product.part[0].out.stride[2] == 1)
    run_weight_gradient<Shape, Out, OutputMajor::kColumn>(product);
  else
    run_weight_gradient<Shape, Out, OutputMajor::kRow>(product);
}

template <class Element, int kColumns>
void weight_gradient(const WeightGradientProduct& product) {
  using Pairs = TileShape<Element, 128, kColumns, Schedule::kCooperative, 2>;
  if (product.part[0].out.dtype == TILEMOE_FLOAT32)
    run_weight_gradient_along<Pairs, float>(product);
  else
    run_weight_gradient_along<Pairs, Element>(product);
}

}  // namespace tilemoe::cuda
