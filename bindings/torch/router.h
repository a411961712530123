#pragma once

#include <tuple>

#include "operators.h"
#include "packing.h"

namespace tilemoe_torch {

// Each token's scores (T, K), ids (T, K) and how often each expert was chosen (E).
std::tuple<Tensor, Tensor, Tensor> choose(const Call& call, const Tensor& logits,
                                          const MaybeTensor& selection_bias, const Rule& rule,
                                          double routed_scaling_factor, ScalarType ids_dtype);

// From ds to the gradient (T, E) of the logits of the routing's tokens, of `dtype`. The logits are
// required only if the scoring's rule reads them.
Tensor logits_gradient(const Call& call, const tilemoe_routing& routing, const Tensor& ds,
                       const MaybeTensor& logits, int64_t scoring, double routed_scaling_factor,
                       ScalarType dtype);

}  // namespace tilemoe_torch
