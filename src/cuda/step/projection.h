// What the up- and the down-projection share on the host: tensor maps of weights and outputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include <limits>

#include "backend.h"
#include "check.h"
#include "cuda/epilogue/activation_functions.h"
#include "cuda/epilogue/bias.h"
#include "cuda/schedule/cost.h"
#include "cuda/schedule/row_tiles.h"
#include "cuda/sm90/launch.h"
#include "cuda/sm90/load_dense_rows.h"
#include "cuda/sm90/load_gathered_rows.h"
#include "cuda/sm90/load_weights.h"
#include "cuda/sm90/store_ragged.h"
#include "cuda/sm90/tensor_map.h"

namespace tilemoe::cuda {

template <class Element>
inline constexpr tilemoe_dtype kDTypeOf =
    std::is_same_v<Element, __half> ? TILEMOE_FLOAT16 : TILEMOE_BFLOAT16;

inline Major major_of(const tilemoe_tensor& weights) {
  return weights.stride[2] == 1 ? Major::kK : Major::kMN;
}

inline ActivationParams activation_params(const tilemoe_experts& experts) {
  return {.kind = experts.activation,
          .clamp = experts.clamp != 0 ? experts.clamp : std::numeric_limits<float>::infinity(),
          .alpha = experts.alpha != 0 ? experts.alpha : 1.f,
          .up_shift = experts.up_shift};
}

// The rows of `source` that the routing names. From one to the next 32 bits of bytes, so that an
// address is one multiplication.
inline GatherSource gathered_rows(const tilemoe_tensor& source, const Rows& rows) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(source.dtype));
  const int64_t bytes = source.shape[0] > 1 ? source.stride[0] * element : 0;
  TILEMOE_CHECK_SUPPORTED(bytes >= 0 && bytes <= UINT32_MAX,
                          "rows of " << bytes << " bytes are too far apart to be gathered");
  return {.source = source.data,
          .row_bytes = static_cast<uint32_t>(bytes),
          .width_bytes = static_cast<int32_t>(source.shape[1] * element),
          .token = rows.token};
}

// Operand A: rows as they lie.
template <class Shape>
typename DenseRows<Shape>::Params dense_rows(const tilemoe_tensor& source) {
  return {make_tensor_map({.dtype = kDTypeOf<typename Shape::Element>,
                           .data = source.data,
                           .size = {source.shape[1], source.shape[0], 1},
                           .stride = {source.stride[0], 0},
                           .box = {Shape::BLOCK_K, Shape::BLOCK_M, 1}})};
}

// A part of the weights of one width: `rows` rows from row `first` on, every `every`th.
template <class Shape, Major kMajor, int kBoxRows>
CUtensorMap weights_map(const tilemoe_tensor& W, int64_t first, int64_t rows, int64_t every = 1) {
  const int64_t E = W.shape[0], sum = W.shape[2];
  const auto* data = static_cast<const typename Shape::Element*>(W.data) + first * W.stride[1];
  const tilemoe_dtype dtype = kDTypeOf<typename Shape::Element>;
  if constexpr (kMajor == Major::kK)
    return make_tensor_map({.dtype = dtype,
                            .data = data,
                            .size = {sum, rows, E},
                            .stride = {W.stride[1] * every, W.stride[0]},
                            .box = {Shape::BLOCK_K, kBoxRows, 1}});
  else
    return make_tensor_map({.dtype = dtype,
                            .data = data,
                            .size = {rows, sum, E},
                            .stride = {W.stride[2], W.stride[0]},
                            .box = {64, Shape::BLOCK_K, 1}});
}

// Rows of `parts` parts of `columns` columns each, which end at an expert's last; in boxes of
// `box_rows` rows.
template <class Element>
CUtensorMap ragged_map(const tilemoe_tensor& rows, int64_t parts, int64_t columns, int box_rows) {
  return make_ragged_parts_map({.dtype = kDTypeOf<Element>,
                                .data = rows.data,
                                .columns = columns,
                                .rows = rows.shape[0],
                                .row_stride = rows.stride[0],
                                .box = {kStoreColumns, box_rows}},
                               {.count = parts, .stride = columns});
}

template <class Element>
RaggedOutput ragged_output_of(const tilemoe_tensor& out, int64_t parts, int64_t columns) {
  if (!present(out)) return {};
  return {.map = ragged_map<Element>(out, parts, columns, kStoreRows),
          .columns = static_cast<int32_t>(columns)};
}

// Tiles of BLOCK_M rows over all experts by `n_blocks`; the order's and its bound on the host.
template <class Shape>
using RowTilesOf = RowTiles<Shape::BLOCK_M, Shape::kCluster>;

template <class Shape>
typename RowTilesOf<Shape>::Params row_tiles(const Rows& rows, int64_t n_blocks, int64_t k_blocks) {
  return {.offsets = rows.offsets,
          .E = static_cast<int32_t>(rows.E),
          .n_blocks = static_cast<int32_t>(n_blocks),
          .n_group = std::min(column_group(), static_cast<int32_t>(n_blocks)),
          .k_blocks = static_cast<int32_t>(k_blocks)};
}

template <class Shape>
int64_t row_tiles_at_most(const Rows& rows, int64_t n_blocks) {
  const int64_t m_blocks =
      rows.capacity / Shape::BLOCK_M + std::min<int64_t>(rows.E, rows.capacity);
  TILEMOE_CHECK_SUPPORTED(m_blocks <= INT32_MAX / (2 * n_blocks),
                          "the product of " << rows.capacity << " rows of " << rows.E
                                            << " experts has too many tiles to count");
  return m_blocks * n_blocks;
}

}  // namespace tilemoe::cuda
