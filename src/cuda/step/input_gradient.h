// dX~ = dH W1, summed over gate and up columns of dH. One instantiation file a type.
#pragma once

#include "cuda/sm90/epilogue_store.h"
#include "cuda/sm90/load_summed_parts.h"
#include "cuda/step/projection.h"
#include "cuda/step/projection_tiles.h"
#include "cuda/step/up_parts.h"

namespace tilemoe::cuda {

template <class Shape, Major kMajor>
void run_input_gradient(const InputGradient& step) {
  using Epilogue = StoreEpilogue<Shape>;
  using LoadW1 = SummedWeights<Shape, kMajor>;
  using Gemm = GroupedGemm<Shape, DensePartRows<Shape>, LoadW1, Epilogue, RowTilesOf<Shape>>;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& weights = step.weights;
  const UpParts parts =
      up_parts(experts, weights.W1, weights.W1_up, has_adjacent_columns(experts, weights.W1));
  const int64_t d = step.dX_rows.shape[1];
  const int64_t n_blocks = (d + Shape::BLOCK_N - 1) / Shape::BLOCK_N;
  const int64_t blocks_a_part = (parts.columns + Shape::BLOCK_K - 1) / Shape::BLOCK_K;

  typename Gemm::Params params{};
  params.a.rows = make_tensor_map({.dtype = step.dH.dtype,
                                   .data = step.dH.data,
                                   .size = {parts.columns, parts.count, step.dH.shape[0]},
                                   .stride = {parts.columns, step.dH.stride[0]},
                                   .box = {Shape::BLOCK_K, 1, Shape::BLOCK_M}});
  params.a.blocks_a_part = params.b.blocks_a_part = static_cast<int32_t>(blocks_a_part);
  for (int p = 0; p < parts.count; ++p)
    params.b.part[p] =
        weights_map<Shape, kMajor, LoadW1::kBoxRows>(transposed(parts.part[p]), 0, d);
  if (parts.count == 1) params.b.part[1] = params.b.part[0];
  params.epilogue.D = ragged_output_of<typename Shape::Element>(step.dX_rows, 1, d);
  params.order = row_tiles<Shape>(step.rows, n_blocks, parts.count * blocks_a_part);
  launch<Gemm>(params, row_tiles_at_most<Shape>(step.rows, n_blocks), step.stream,
               step.block_turns);
}

template <class Element, Major kMajor>
void run_input_gradient_along(const InputGradient& step) {
  using Cluster256 = TileShape<Element, 128, 256, Schedule::kCooperative, 2>;
  using Cluster192 = TileShape<Element, 128, 192, Schedule::kCooperative, 2>;
  if (tile_of(step) == kCooperative192Cluster)
    run_input_gradient<Cluster192, kMajor>(step);
  else
    run_input_gradient<Cluster256, kMajor>(step);
}

template <class Element>
void input_gradient(const InputGradient& step) {
  if (step.weights.W1.stride[2] == 1)
    run_input_gradient_along<Element, Major::kMN>(step);
  else
    run_input_gradient_along<Element, Major::kK>(step);
}

}  // namespace tilemoe::cuda
