// The types of logits and of their gradient, which is of the logits' type or float32.
#pragma once

#include "dtype.h"

namespace tilemoe::cuda {

// Calls body.operator()<Logit, Gradient>(); refuses any other type of the gradient.
template <class Body>
void with_gradient_types(tilemoe_dtype logits, tilemoe_dtype gradient, const Body& body) {
  with_float(logits, [&]<class Logit>() {
    if (gradient == TILEMOE_FLOAT32)
      body.template operator()<Logit, float>();
    else
      with_one_of<Logit>(gradient,
                         [&]<class Gradient>() { body.template operator()<Logit, Gradient>(); });
  });
}

}  // namespace tilemoe::cuda
