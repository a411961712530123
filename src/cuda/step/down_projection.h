// Y = A W2^T + b2. One instantiation file a type.
#pragma once

#include "cuda/sm90/epilogue_store.h"
#include "cuda/step/projection.h"
#include "cuda/step/projection_tiles.h"

namespace tilemoe::cuda {

template <class Shape, Major kMajor>
void run_down_projection(const DownProjection& step) {
  using Epilogue = StoreEpilogue<Shape>;
  using LoadW2 = Weights<Shape, kMajor, 1>;
  using Gemm = GroupedGemm<Shape, DenseRows<Shape>, LoadW2, Epilogue, RowTilesOf<Shape>>;
  const int64_t n = step.experts->n, d = step.Y.shape[1];
  const int64_t n_blocks = (d + Shape::BLOCK_N - 1) / Shape::BLOCK_N;
  const int64_t k_blocks = (n + Shape::BLOCK_K - 1) / Shape::BLOCK_K;

  typename Gemm::Params params{};
  params.a = dense_rows<Shape>(step.A);
  params.b.part[0] = weights_map<Shape, kMajor, LoadW2::kBoxRows>(step.W2, 0, d);
  params.epilogue.D = ragged_output_of<typename Shape::Element>(step.Y, 1, d);
  if (present(step.b2))
    params.epilogue.bias = {.data = step.b2.data,
                            .expert_stride = step.b2.stride[0],
                            .column_stride = 1,
                            .columns = static_cast<int32_t>(d)};
  params.order = row_tiles<Shape>(step.rows, n_blocks, k_blocks);
  launch<Gemm>(params, row_tiles_at_most<Shape>(step.rows, n_blocks), step.stream,
               step.block_turns);
}

template <class Element>
void down_projection(const DownProjection& step) {
  using Cooperative256 = TileShape<Element, 128, 256, Schedule::kCooperative>;
  using Cooperative256Cluster = TileShape<Element, 128, 256, Schedule::kCooperative, 2>;
  if (major_of(step.W2) == Major::kMN) return run_down_projection<Cooperative256, Major::kMN>(step);
  const TileConfiguration tile = tile_of(step);
  if (tile == kPingPong128)
    run_down_projection<TileShape<Element, 128, 128, Schedule::kPingPong>, Major::kK>(step);
  else if (tile == kCooperative192Cluster)
    run_down_projection<TileShape<Element, 128, 192, Schedule::kCooperative, 2>, Major::kK>(step);
  else if (tile == kCooperative256Cluster)
    run_down_projection<Cooperative256Cluster, Major::kK>(step);
  else
    run_down_projection<Cooperative256, Major::kK>(step);
}

}  // namespace tilemoe::cuda
