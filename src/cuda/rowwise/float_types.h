// From the dtype of logits, or of a gradient, to the C++ type of its elements.
#pragma once

#include "check.h"
#include "routing/half.h"

namespace tilemoe::cuda {

template <class T>
struct FloatType {
  using Type = T;
};

// Calls body(FloatType<Element>) for a floating-point dtype.
template <class Body>
void with_float_type(tilemoe_dtype dtype, Body&& body) {
  switch (dtype) {
    case TILEMOE_FLOAT32: return body(FloatType<float>{});
    case TILEMOE_BFLOAT16: return body(FloatType<BFloat16>{});
    case TILEMOE_FLOAT16: return body(FloatType<Float16>{});
    default: TILEMOE_ASSERT(false, tilemoe_dtype_name(dtype) << " is not a floating-point type");
  }
}

// Calls body(FloatType<Logit>, FloatType<Gradient>): the gradient of logits is of their type, or
// float32.
template <class Body>
void with_gradient_types(tilemoe_dtype logits, tilemoe_dtype gradient, Body&& body) {
  with_float_type(logits, [&](auto logit) {
    if (gradient == TILEMOE_FLOAT32)
      body(logit, FloatType<float>{});
    else
      body(logit, logit);
  });
}

}  // namespace tilemoe::cuda
