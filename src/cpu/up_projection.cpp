// H = X W1^T + b1, A = act(H). A task is a tile of an expert's rows by a range of A's columns, with
// the gate and up columns of H that it comes from.
#include "cpu/activation.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/fp8_gemm.h"
#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

void add_bias(const UpParts& biases, float* gate, float* up) {
  alignas(64) float bias[2 * kInnerColumns];
  for (const UpPart& part : biases) {
    to_float(part.weights.data, part.weights.dtype, part.weights.row_stride, bias, part.columns);
    add_scaled(bias, TILEMOE_FLOAT32, 1.0f, part.half ? up : gate, part.columns);
  }
}

// The fp8 recipe: the codes of W1 that make the columns of A from `first` on, in this half of H.
Fp8Operand codes_of_W1(const UpProjection& step, int64_t expert, int half, int64_t first) {
  const tilemoe_experts& experts = *step.experts;
  const bool split = experts.gate_layout == TILEMOE_GATE_SPLIT;
  const tilemoe_quantized& weight = split && half == 1 ? step.codes.up : step.codes.weight;
  return {.weight = &weight,
          .rows = split ? experts.n : 2 * experts.n,
          .width = experts.d,
          .expert = expert,
          .first = split ? first : half * experts.n + first};
}

void project(const UpProjection& step, const RowTile& tile, int64_t first, int64_t columns,
             const WorkerScratch& scratch) {
  const tilemoe_experts& experts = *step.experts;
  const bool gated = tilemoe_activation_gated(experts.activation) != 0;
  const bool keeps_H = step.H.ndim != 0;
  const bool H_in_place = keeps_H && step.H.dtype == TILEMOE_FLOAT32;
  const bool fp8 = step.A_codes.given();
  const Matrix H_gate = keeps_H ? row_matrix(step.H).at(tile.first, first) : Matrix{};
  const Matrix H_up = keeps_H ? H_gate.at(0, experts.n) : Matrix{};

  // The accumulator: gate columns, then up columns, `up_offset` apart.
  float* accumulator = H_in_place ? reinterpret_cast<float*>(H_gate.data) : scratch.tile;
  const int64_t row_stride = H_in_place ? H_gate.row_stride : (gated ? 2 * columns : columns);
  const int64_t up_offset = H_in_place ? experts.n : columns;

  if (fp8) {
    const Fp8Tile X{step.X_codes, experts.d, step.rows.token, tile.first};
    for (int half = 0; half < 2; ++half)
      multiply_fp8(tile.rows, columns, X, codes_of_W1(step, tile.expert, half, first),
                   /*add=*/false, accumulator + half * up_offset, row_stride);
  } else {
    const Matrix X = row_matrix(step.X, step.rows.token).at(tile.first, 0);
    const UpParts weights =
        up_parts(experts, step.weights.W1, step.weights.W1_up, tile.expert, first, columns);
    for (const UpPart& part : weights)
      multiply(tile.rows, part.columns, experts.d, X, part.weights.transposed(), /*add=*/false,
               accumulator + part.half * up_offset, row_stride, scratch.panels);
  }

  for (int half = 0; half < (gated ? 2 : 1); ++half)
    add_adapter(step.adapter, tile.expert, tile.first, tile.rows, half * experts.n + first, columns,
                accumulator + half * up_offset, row_stride, scratch.panels);

  const UpParts biases =
      up_parts(experts, step.weights.b1, step.weights.b1_up, tile.expert, first, columns);
  const Matrix A = present(step.A) ? row_matrix(step.A).at(tile.first, first) : Matrix{};
  alignas(64) float buffer[kInnerColumns];
  for (int64_t i = 0; i < tile.rows; ++i) {
    float* gate = accumulator + i * row_stride;
    float* up = gated ? gate + up_offset : nullptr;
    add_bias(biases, gate, up);
    if (keeps_H && !H_in_place) {
      from_float(gate, H_gate.row(i), step.H.dtype, 1, columns, false);
      if (gated) from_float(up, H_up.row(i), step.H.dtype, 1, columns, false);
    }
    if (step.H_codes.given()) store_codes_of_H(step, tile.first + i, first, columns, gate, up);
    if (fp8) {
      activate(experts, gate, up, buffer, columns);
      store_codes(step, tile.first + i, first, columns, buffer);
      if (A.data != nullptr) from_float(buffer, A.row(i), A.dtype, 1, columns, false);
    } else if (A.dtype == TILEMOE_FLOAT32) {
      activate(experts, gate, up, reinterpret_cast<float*>(A.row(i)), columns);
    } else {
      activate(experts, gate, up, buffer, columns);
      from_float(buffer, A.row(i), A.dtype, 1, columns, false);
    }
  }
}

}  // namespace

void up_projection(const UpProjection& step) {
  for_each_tile(step, step.experts->n, kInnerColumns, project);
}

}  // namespace tilemoe::cpu
