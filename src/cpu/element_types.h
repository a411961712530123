// The elements of a tensor whose type is known.
#pragma once

#include "dtype.h"

namespace tilemoe::cpu {

// First element of row `row` of a matrix.
template <class Element>
Element* row_of(const tilemoe_tensor& matrix, int64_t row) {
  return static_cast<Element*>(matrix.data) + row * matrix.stride[0];
}

}  // namespace tilemoe::cpu
