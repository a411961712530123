// From a tensor's dtype to the C++ type of its elements.
#pragma once

#include "check.h"
#include "routing/half.h"

namespace tilemoe::cpu {

template <class T>
struct TypeTag {
  using Type = T;
};

// Calls body(TypeTag<Element>) for a floating-point dtype.
template <class Body>
void with_float_type(tilemoe_dtype dtype, Body&& body) {
  switch (dtype) {
    case TILEMOE_FLOAT32: return body(TypeTag<float>{});
    case TILEMOE_BFLOAT16: return body(TypeTag<BFloat16>{});
    case TILEMOE_FLOAT16: return body(TypeTag<Float16>{});
    default: TILEMOE_ASSERT(false, tilemoe_dtype_name(dtype) << " is not a floating-point type");
  }
}

// The same for an integer dtype.
template <class Body>
void with_integer_type(tilemoe_dtype dtype, Body&& body) {
  switch (dtype) {
    case TILEMOE_INT32: return body(TypeTag<int32_t>{});
    case TILEMOE_INT64: return body(TypeTag<int64_t>{});
    default: TILEMOE_ASSERT(false, tilemoe_dtype_name(dtype) << " is not an integer type");
  }
}

// First element of row `row` of a matrix.
template <class Element>
Element* row_of(const tilemoe_tensor& matrix, int64_t row) {
  return static_cast<Element*>(matrix.data) + row * matrix.stride[0];
}

}  // namespace tilemoe::cpu
