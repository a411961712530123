#pragma once

#include <tuple>

#include "operators.h"

namespace tilemoe_torch {

// Each token's scores (T, K), ids (T, K) and how often each expert was chosen (E).
std::tuple<Tensor, Tensor, Tensor> choose(const Call& call, const Tensor& logits,
                                          const MaybeTensor& selection_bias, int64_t K,
                                          int64_t scoring, ScalarType ids_dtype);

}  // namespace tilemoe_torch
