// Both weight gradients: per expert, the sum over its rows of dense^T gathered. One instantiation
// file a type; the two steps share their kernels.
#pragma once

#include "cuda/epilogue/weight_gradient.h"
#include "cuda/load/summed_rows.h"
#include "cuda/schedule/expert_tiles.h"
#include "cuda/step/projection.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

// The dense operand's columns are the gradient's rows where these are contiguous (kDense kA), else
// its columns.
template <class Shape, class Out, Side kDense>
void run_weight_gradient(const WeightGradientProduct& product) {
  constexpr Side kGathered = kDense == Side::kA ? Side::kB : Side::kA;
  using Element = typename Shape::Element;
  using LoadDense = DenseSummedRows<Shape, kDense>;
  using LoadGathered = GatheredSummedRows<Shape, kGathered>;
  using LoadA = std::conditional_t<kDense == Side::kA, LoadDense, LoadGathered>;
  using LoadB = std::conditional_t<kDense == Side::kA, LoadGathered, LoadDense>;
  using Epilogue = WeightGradientEpilogue<Shape, Out, kDense>;
  using Gemm = GroupedGemm<Shape, LoadA, LoadB, Epilogue, ExpertTiles<Shape::BLOCK_K>>;
  constexpr auto kElementBytes = static_cast<int64_t>(sizeof(Element));
  constexpr int64_t kDenseBlock = LoadDense::Operand::kRows;
  constexpr int64_t kGatheredBlock = LoadGathered::Operand::kRows;
  const int64_t n = product.dense_columns, d = product.gathered.shape[1];
  const int64_t dense_blocks = (n + kDenseBlock - 1) / kDenseBlock;
  const int64_t gathered_blocks = (d + kGatheredBlock - 1) / kGatheredBlock;

  typename Gemm::Params params{};
  auto& dense = [&]() -> auto& {
    if constexpr (kDense == Side::kA)
      return params.a;
    else
      return params.b;
  }
  ();
  auto& gathered = [&]() -> auto& {
    if constexpr (kDense == Side::kA)
      return params.b;
    else
      return params.a;
  }
  ();
  gathered = {.source = product.gathered.data,
              .row_bytes = product.gathered.stride[0] * kElementBytes,
              .width_bytes = static_cast<int32_t>(d * kElementBytes),
              .token = product.rows.token};
  dense.blocks_a_part = params.epilogue.blocks_a_part = static_cast<int32_t>(dense_blocks);
  for (int p = 0; p < product.parts; ++p) {
    const auto& part = product.part[p];
    // Without rows there may be no dense matrix, and none is read; a map has an address all the
    // same.
    const auto* const matrix =
        static_cast<const Element*>(product.rows.capacity > 0 ? product.dense.data : part.out.data);
    dense.part[p] = make_ragged_map({.dtype = kDTypeOf<Element>,
                                     .data = matrix + part.dense_first,
                                     .columns = n,
                                     .rows = product.rows.capacity,
                                     .row_stride = product.dense.stride[0],
                                     .box = {64, Shape::BLOCK_K}});
    const tilemoe_tensor& out = part.out;  // (E, n, d)
    const int64_t row_stride = kDense == Side::kA ? out.stride[1] : out.stride[2];
    auto& to = params.epilogue.part[p];
    to.data = static_cast<Out*>(out.data);
    to.expert_stride = out.stride[0];
    to.row_stride = row_stride;
    const int64_t columns = kDense == Side::kA ? d : n, rows = kDense == Side::kA ? n : d;
    if constexpr (!Epilogue::kFloat)
      to.out.map = make_tensor_map(
          {.dtype = kDTypeOf<Element>,
           .data = out.data,
           .size = {columns, out.shape[0], rows},
           .stride = {out.stride[0], row_stride},
           .box = {Epilogue::kSlice, 1, kStoreRows},
           .swizzle = Epilogue::kSlice == 64 ? Swizzle::k128Bytes : Swizzle::k64Bytes});
    params.epilogue.rows = static_cast<int32_t>(rows);
    params.epilogue.columns = static_cast<int32_t>(columns);
  }
  if (product.parts == 1) dense.part[1] = dense.part[0];
  params.epilogue.accumulate = product.accumulate;
  const int64_t all_dense = product.parts * dense_blocks;
  const int64_t m_blocks = kDense == Side::kA ? all_dense : gathered_blocks;
  const int64_t n_blocks = kDense == Side::kA ? gathered_blocks : all_dense;
  TILEMOE_CHECK_SUPPORTED(
      m_blocks <= INT32_MAX / (2 * n_blocks * product.rows.E),
      "the weight gradients of " << product.rows.E << " experts have too many tiles to count");
  params.order = {.offsets = product.rows.offsets,
                  .E = static_cast<int32_t>(product.rows.E),
                  .m_blocks = static_cast<int32_t>(m_blocks),
                  .n_blocks = static_cast<int32_t>(n_blocks),
                  .n_group = std::min(kColumnGroup, static_cast<int32_t>(n_blocks))};
  launch<Gemm>(params, product.rows.E * m_blocks * n_blocks, product.stream);
}

template <class Element, class Out>
void run_weight_gradient_along(const WeightGradientProduct& product) {
  // The gathered operand has the tile's short side: copies by threads are what limits these
  // kernels. With 256 gathered columns dW1 was a tenth slower.
  if (product.part[0].out.stride[2] == 1)
    run_weight_gradient<TileShape<Element, 256, 128, Schedule::kCooperative>, Out, Side::kA>(
        product);
  else
    run_weight_gradient<TileShape<Element, 128, 256, Schedule::kCooperative>, Out, Side::kB>(
        product);
}

template <class Element>
void weight_gradient(const WeightGradientProduct& product) {
  if (product.part[0].out.dtype == TILEMOE_FLOAT32)
    run_weight_gradient_along<Element, float>(product);
  else
    run_weight_gradient_along<Element, Element>(product);
}

}  // namespace tilemoe::cuda
