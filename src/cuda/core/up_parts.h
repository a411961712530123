// W1 or its gradient as the parts that make H's columns: gate and then up, whatever the layout, or
// both at once where H has them in adjacent columns.
#pragma once

#include <cstdint>
#include <utility>

#include "check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

struct UpParts {
  tilemoe_tensor part[2];  // (E, columns, d) each; absent where its tensor is
  int count;
  int64_t columns;  // of H, that a part makes
};

// H, and with it dH, has gate and up of a column side by side where W1 does: interleaved and
// contiguous along 2n. TMA cannot part them.
inline bool has_adjacent_columns(const tilemoe_experts& experts, const tilemoe_tensor& W1) {
  return experts.gate_layout == TILEMOE_GATE_INTERLEAVED && present(W1) && W1.stride[2] != 1;
}

// `rows` rows from row `first` on, every `every`th.
inline tilemoe_tensor rows_of(tilemoe_tensor W, int64_t first, int64_t rows, int64_t every) {
  if (!present(W)) return W;
  W.data = static_cast<char*>(W.data) +
           first * W.stride[1] * static_cast<int64_t>(tilemoe_dtype_size(W.dtype));
  W.shape[1] = rows;
  W.stride[1] *= every;
  return W;
}

inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up, bool adjacent) {
  const int64_t n = experts.n;
  if (adjacent) return {{W, {}}, 1, 2 * n};
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

}  // namespace tilemoe::cuda
