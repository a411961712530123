// W1, its gradient or its biases as the parts that make H's columns: gate and then up, whatever the
// layout.
#pragma once

#include <cstdint>
#include <utility>

#include "check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

struct UpParts {
  tilemoe_tensor part[2];  // (E, columns, ...) each; absent where its tensor is
  int count;
  int64_t columns;  // of H, that a part makes
};

// `rows` rows from row `first` on, `step` apart.
inline tilemoe_tensor rows_of(tilemoe_tensor W, int64_t first, int64_t rows, int64_t step) {
  if (!present(W)) return W;
  W.data = static_cast<char*>(W.data) +
           first * W.stride[1] * static_cast<int64_t>(tilemoe_dtype_size(W.dtype));
  W.shape[1] = rows;
  W.stride[1] *= step;
  return W;
}

inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up) {
  const int64_t n = experts.n;
  if (!tilemoe_activation_gated(experts.activation)) return {{W, {}}, 1, n};
  switch (experts.gate_layout) {
    case TILEMOE_GATE_SPLIT: return {{W, W_up}, 2, n};
    case TILEMOE_GATE_INTERLEAVED: return {{rows_of(W, 0, n, 2), rows_of(W, 1, n, 2)}, 2, n};
    default: return {{rows_of(W, 0, n, 1), rows_of(W, n, n, 1)}, 2, n};
  }
}

// (E, a, b) as (E, b, a)
inline tilemoe_tensor transposed(tilemoe_tensor W) {
  std::swap(W.shape[1], W.shape[2]);
  std::swap(W.stride[1], W.stride[2]);
  return W;
}

}  // namespace tilemoe
