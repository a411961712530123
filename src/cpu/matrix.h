// Views of matrices that lie in the caller's memory in whatever type and layout they have there.
#pragma once

#include <cstdint>
#include <utility>

#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

// Element (i, j) lies row(i) * row_stride + column(j) * column_stride elements after `data`, where
// row(i) is i, or row_index[i] in a gathered matrix. At most one of the two indices is given, and
// the other dimension then is the contiguous one.
struct Matrix {
  char* data = nullptr;
  tilemoe_dtype dtype = TILEMOE_FLOAT32;
  int64_t row_stride = 0;
  int64_t column_stride = 1;
  const int32_t* row_index = nullptr;
  const int32_t* column_index = nullptr;

  // The part that begins at element (i, j).
  Matrix at(int64_t i, int64_t j) const {
    Matrix part = *this;
    int64_t elements = 0;
    if (row_index)
      part.row_index += i;
    else
      elements += i * row_stride;
    if (column_index)
      part.column_index += j;
    else
      elements += j * column_stride;
    part.data += elements * element_size();
    return part;
  }

  Matrix transposed() const {
    Matrix other = *this;
    std::swap(other.row_stride, other.column_stride);
    std::swap(other.row_index, other.column_index);
    return other;
  }

  char* row(int64_t i) const {
    return data + (row_index ? int64_t{row_index[i]} : i) * row_stride * element_size();
  }
  bool rows_are_contiguous() const {
    return row_index || (!column_index && column_stride <= row_stride);
  }
  int64_t element_size() const { return static_cast<int64_t>(tilemoe_dtype_size(dtype)); }
};

// Rows of X, dO, H, ...: (rows, columns), the last dimension contiguous. `index` gathers.
inline Matrix row_matrix(const tilemoe_tensor& tensor, const int32_t* index = nullptr) {
  Matrix matrix;
  matrix.data = static_cast<char*>(tensor.data);
  matrix.dtype = tensor.dtype;
  // The stride of a single row means nothing; products want one that its columns fit in.
  matrix.row_stride = tensor.shape[0] == 1 ? tensor.shape[1] : tensor.stride[0];
  matrix.row_index = index;
  return matrix;
}

// One expert's matrix of a weight (E, rows, columns), or of a bias (E, rows) as a single column.
inline Matrix expert_matrix(const tilemoe_tensor& tensor, int64_t expert) {
  Matrix matrix;
  matrix.dtype = tensor.dtype;
  matrix.row_stride = tensor.stride[1];
  matrix.column_stride = tensor.ndim == 3 ? tensor.stride[2] : 0;
  matrix.data = static_cast<char*>(tensor.data) + expert * tensor.stride[0] * matrix.element_size();
  return matrix;
}

}  // namespace tilemoe::cpu
