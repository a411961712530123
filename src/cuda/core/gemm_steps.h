// Shared by the GEMMs: the gate and up columns of W1, and the weight gradients as one step.
#pragma once

#include <cstdint>

#include "core/step_arguments.h"

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

// Rows of a quantised weight (E, R, C) that make the columns of a GEMM, as parts of `count` rows.
// Part p begins at row first[p]; its rows are `step` apart.
struct CodeRows {
  int64_t first[2];
  int64_t count, step;
  int64_t R;  // rows of the weight
};

// The parts of up_parts().
inline CodeRows up_code_rows(const tilemoe_experts& experts) {
  const int64_t n = experts.n;
  if (!tilemoe_activation_gated(experts.activation)) return {{0, 0}, n, 1, n};
  switch (experts.gate_layout) {
    case TILEMOE_GATE_SPLIT: return {{0, 0}, n, 1, n};
    case TILEMOE_GATE_INTERLEAVED: return {{0, 1}, n, 2, 2 * n};
    default: return {{0, n}, n, 1, 2 * n};
  }
}
inline CodeRows down_code_rows(const DownProjection& step) {
  return {{step.codes.first_row, 0}, step.Y.shape[1], 1, step.experts->d};
}
// The same of transposed weights.
inline CodeRows activation_code_rows(const ActivationGradient& step) {
  return {{0, 0}, step.experts->n, 1, step.experts->n};
}
inline CodeRows input_code_rows(const InputGradient& step) {
  return {{step.codes.first_row, 0}, step.dX_rows.shape[1], 1, step.experts->d};
}

// The fp8 recipe: whether A is written as codes and in 16 bits, for an adapter of W2. The kernels of
// an adapter of W1 do that, with or without one.
template <class Step>
bool writes_A_twice(const Step& /*step*/) {
  return false;
}
inline bool writes_A_twice(const UpProjection& step) {
  return step.A_codes.given() && present(step.A);
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
