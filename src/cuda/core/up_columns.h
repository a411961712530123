// The parts of W1 as the CUDA backend takes them.
#pragma once

#include "up_parts.h"

namespace tilemoe::cuda {

// H, and with it dH, has gate and up of a column side by side where W1 does: interleaved and
// contiguous along 2n. TMA cannot part them.
inline bool has_adjacent_columns(const tilemoe_experts& experts, const tilemoe_tensor& W1) {
  return experts.gate_layout == TILEMOE_GATE_INTERLEAVED && present(W1) && W1.stride[2] != 1;
}

// Gate, then up; or both at once where H has them in adjacent columns.
inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up, bool adjacent) {
  if (adjacent) return {{W, {}}, 1, 2 * experts.n};
  return tilemoe::up_parts(experts, W, W_up);
}

}  // namespace tilemoe::cuda
