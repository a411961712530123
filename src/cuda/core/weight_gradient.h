// What the weight gradients have in common.
#pragma once

#include <cstdint>

#include "backend.h"

namespace tilemoe::cuda {

// Per expert and part, out = [out +] the sum over the expert's rows of dense^T gathered. The parts'
// outputs have one dtype and one major.
struct WeightGradient {
  const tilemoe_experts* experts;
  Rows rows;
  tilemoe_tensor dense;     // (capacity, columns)
  int64_t dense_columns;    // of a part
  tilemoe_tensor gathered;  // (T, d)
  struct Part {
    tilemoe_tensor out;   // (E, dense_columns, d)
    int64_t dense_first;  // column of `dense`
  } part[2];
  int parts;
  bool accumulate;
  Scratch scratch;
  int32_t shares;  // of long experts, at most; see schedule/weight_gradient_shares.h
  void* stream;
  Tuning tuning = {};
};

}  // namespace tilemoe::cuda
