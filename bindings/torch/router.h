#pragma once

#include <tuple>

#include "operators.h"
#include "packing.h"

namespace tilemoe_torch {

// Each token's scores (T, K), ids (T, K) and how often each expert was chosen (E). check_choice
// throws before memory is allocated.
void choose_into(const Call& call, const Tensor& logits, const MaybeTensor& selection_bias,
                 const Rule& rule, double routed_scaling_factor, const tilemoe_tensor& scores,
                 const tilemoe_tensor& ids, const Tensor& expert_counts);
void check_choice(const Tensor& logits, int64_t K);

// From ds to the gradient (T, E) of the logits of the routing's tokens, of `dtype`. The logits are
// required only if the scoring's rule reads them. The gradient and the workspace are in `scratch`
// (bytes) from `offset` on if they fit there.
Tensor logits_gradient(const Call& call, const tilemoe_routing& routing, const Tensor& ds,
                       const MaybeTensor& logits, int64_t scoring, double routed_scaling_factor,
                       ScalarType dtype, const Tensor* scratch = nullptr, size_t offset = 0);

}  // namespace tilemoe_torch
