// Typed views of the caller's matrices, and the rows of W1 for every gate layout.
#pragma once

#include <array>
#include <cstdint>
#include <utility>

#include "core/backend.h"
#include "core/dtype.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

// First element of row `row` of a matrix.
template <class Element>
Element* row_of(const tilemoe_tensor& matrix, int64_t row) {
  return static_cast<Element*>(matrix.data) + row * matrix.stride[0];
}

// ---- views of matrices in the caller's memory, with their type and layout

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
  // The stride of a single row means nothing; GEMMs require one that its columns fit in.
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

// The rows of W1 for GEMMs, for every gate layout: for a range of A's columns, the parts of W1 that
// make H's columns. H itself always has gate columns first, then up columns.

struct UpPart {
  Matrix weights;   // (columns, d); of a bias (columns, 1)
  int64_t half;     // 0: begins in H's gate columns (or H has no other), 1: in its up columns
  int64_t columns;  // twice those of the range where the part covers both halves
};

class UpParts {
 public:
  const UpPart* begin() const { return parts_.data(); }
  const UpPart* end() const { return parts_.data() + count_; }
  int64_t count() const { return static_cast<int64_t>(count_); }
  const UpPart& operator[](int64_t index) const { return parts_[static_cast<size_t>(index)]; }
  void push_back(const UpPart& part) { parts_[count_++] = part; }

 private:
  std::array<UpPart, 2> parts_;
  size_t count_ = 0;
};

// Of one expert, for A's columns [first, first + columns). `W` and `W_up` are W1 and W1_up, their
// gradients, or biases; a part whose tensor is absent is left out.
inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up, int64_t expert, int64_t first,
                        int64_t columns) {
  const bool gated = tilemoe_activation_gated(experts.activation) != 0;
  UpParts parts;
  if (gated && experts.gate_layout == TILEMOE_GATE_CONCATENATED && columns == experts.n) {
    if (W.ndim) parts.push_back({expert_matrix(W, expert), 0, 2 * columns});  // both at once
    return parts;
  }
  const tilemoe::UpParts all = tilemoe::up_parts(experts, W, W_up);
  for (int half = 0; half < all.count; ++half)
    if (all.part[half].ndim)
      parts.push_back({expert_matrix(all.part[half], expert).at(first, 0), half, columns});
  return parts;
}

}  // namespace tilemoe::cpu
