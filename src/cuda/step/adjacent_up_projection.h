// The up-projection of W1 with gate and up in adjacent columns, (E, d, 2n): a product of 2n columns
// like any other, whose end makes a column of A of two.
#pragma once

#include "cuda/sm90/epilogue_adjacent_activation.h"
#include "cuda/step/projection.h"

namespace tilemoe::cuda {

template <class Shape>
void run_adjacent_up_projection(const UpProjection& step) {
  using Epilogue = AdjacentActivationEpilogue<Shape>;
  using LoadW1 = Weights<Shape, Major::kMN, 1>;
  using Gemm = GroupedGemm<Shape, GatheredRows<Shape>, LoadW1, Epilogue, RowTilesOf<Shape>>;
  const int64_t n = step.experts->n, d = step.experts->d;
  const tilemoe_tensor& b1 = step.weights.b1;
  const int64_t n_blocks = (2 * n + Shape::BLOCK_N - 1) / Shape::BLOCK_N;
  const int64_t k_blocks = (d + Shape::BLOCK_K - 1) / Shape::BLOCK_K;

  typename Gemm::Params params{};
  params.a = gathered_rows(step.X, step.rows);
  params.b.part[0] = weights_map<Shape, Major::kMN, LoadW1::kBoxRows>(step.weights.W1, 0, 2 * n);
  params.epilogue.H = ragged_output_of<typename Shape::Element>(step.H, 1, 2 * n);
  params.epilogue.A = ragged_output_of<typename Shape::Element>(step.A, 1, n);
  if (present(b1))
    params.epilogue.bias = {.data = b1.data,
                            .expert_stride = b1.stride[0],
                            .column_stride = 1,
                            .columns = static_cast<int32_t>(2 * n)};
  params.epilogue.activation = activation_params(*step.experts);
  params.order = row_tiles<Shape>(step.rows, n_blocks, k_blocks);
  launch<Gemm>(params, row_tiles_at_most<Shape>(step.rows, n_blocks), step.stream,
               step.block_turns);
}

}  // namespace tilemoe::cuda
