// Descriptions of tensors for TMA. Boxes of 64 contiguous bytes have the swizzle of 64 bytes, all
// others that of 128.
#pragma once

#include <cuda.h>

#include <array>
#include <cstdint>

#include "cuda/core/recipe.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

// A tensor of three dimensions, fastest first. The fastest is contiguous; strides and boxes are in
// elements of `dtype`, the strides multiples of 16 bytes. A stride of a dimension of size 1 is
// free.
struct TensorMapSpec {
  tilemoe_dtype dtype;
  const void* data;
  std::array<int64_t, 3> size;
  std::array<int64_t, 2> stride;  // of the second and the third
  std::array<int, 3> box;
};

CUtensorMap make_tensor_map(const TensorMapSpec& spec);

// A matrix whose end is known on the device only: of rows [.., end) the box at column x and row r
// is the one at (x, kRaggedRows - end + r, end, kRaggedRows), and its rows from `end` on are read
// as zeros and not written. The second coordinate is out of bounds exactly there, and the fourth
// takes kRaggedRows rows off the address again, modulo 2^64.
struct RaggedMapSpec {
  tilemoe_dtype dtype;
  const void* data;
  int64_t columns, rows;  // of the whole matrix; `end` is at most `rows`
  int64_t row_stride;     // in elements
  std::array<int, 2> box;
};

inline constexpr int32_t kRaggedRows = 1 << 30;

CUtensorMap make_ragged_map(const RaggedMapSpec& spec);

// The same with several such matrices, `stride` elements apart; the part is the fifth coordinate.
struct MapParts {
  int64_t count, stride;
};
CUtensorMap make_ragged_parts_map(const RaggedMapSpec& spec, const MapParts& parts);

// Rows of `parts` parts of `columns` columns each, which end at an expert's last; in boxes of
// `box_rows` rows.
inline constexpr int kRaggedColumns = 64;  // of a box, unless the caller chooses
template <class Element>
CUtensorMap ragged_rows_map(const tilemoe_tensor& rows, int64_t parts, int64_t columns,
                            int box_rows, int box_columns = kRaggedColumns) {
  return make_ragged_parts_map({.dtype = kDTypeOf<Element>,
                                .data = rows.data,
                                .columns = columns,
                                .rows = rows.shape[0],
                                .row_stride = rows.stride[0],
                                .box = {box_columns, box_rows}},
                               {.count = parts, .stride = columns});
}

}  // namespace tilemoe::cuda
