// The steps of the layer that are no products, as the backend calls them, and the sums of rows of
// several arrays.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

void combine(const Combine& step);
void score_gradient(const ScoreGradient& step);
void bias_gradient(const BiasGradient& step);
size_t bias_gradient_scratch_bytes(const tilemoe_experts& experts, int64_t capacity);
void sum_rows(const tilemoe_sum_rows_args& args);

}  // namespace tilemoe::cuda
