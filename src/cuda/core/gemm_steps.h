// Shared by the GEMMs: the gate and up columns of W1, and the weight gradients as one step.
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace tilemoe::cuda {

// H and dH have interleaved gate/up columns if W1 has them: interleaved and contiguous along 2n.
// TMA cannot separate them.
inline bool has_interleaved_columns(const tilemoe_experts& experts, const tilemoe_tensor& W1) {
  return experts.gate_layout == TILEMOE_GATE_INTERLEAVED && present(W1) && W1.stride[2] != 1;
}

// Gate, then up; or both at once if H has interleaved gate/up columns.
inline UpParts up_parts(const tilemoe_experts& experts, const tilemoe_tensor& W,
                        const tilemoe_tensor& W_up, bool interleaved_columns) {
  if (interleaved_columns) return {{W, {}}, 1, 2 * experts.n};
  return tilemoe::up_parts(experts, W, W_up);
}

// ---- the weight gradients

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
  int32_t splits;  // maximum number of splits of long experts (gemm/schedule/sizes.h)
  void* stream;
  Tuning tuning = {};
  bool of_factor = false;  // of an adapter: few dense columns take a narrow tile
};

}  // namespace tilemoe::cuda
