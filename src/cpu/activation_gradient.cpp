// dA' = dO W2, and from it and H: dH, A' and the partial sums of ds. A task is a tile of an
// expert's rows by a range of A's columns: whole groups of ds. Inside a group the order of ds's sum
// is that of sum_each_vector(), the machine's.
#include <algorithm>

#include "cpu/activation.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/fp8_gemm.h"
#include "cpu/gemm.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

static_assert(kInnerColumns % kDsColumns == 0, "a task has whole groups of ds");

// A row that is read or written as float32: in place if it is float32, else through `buffer`.
float* as_float(char* row, tilemoe_dtype dtype, float* buffer) {
  return dtype == TILEMOE_FLOAT32 ? reinterpret_cast<float*>(row) : buffer;
}
void store_unless_in_place(const float* values, char* row, tilemoe_dtype dtype, int64_t columns) {
  if (values && dtype != TILEMOE_FLOAT32) from_float(values, row, dtype, 1, columns, false);
}

// One row's group of columns, where each tensor has its first.
struct RowPlaces {
  char* H_gate;   // null if H is codes
  char* H_up;     // null without a gate, and if H is codes
  char* dH_gate;  // null: not wanted
  char* dH_up;
  char* A_scaled;  // null: not wanted
};

// A row's group of columns of H in float32.
struct RowOfH {
  alignas(64) float buffers[2][kDsColumns];
  float* gate;
  float* up;  // null without a gate

  RowOfH(const RowOfH&) = delete;
  RowOfH(const RowPlaces& at, tilemoe_dtype dtype, int64_t columns)
      : gate(as_float(at.H_gate, dtype, buffers[0])),
        up(at.H_up ? as_float(at.H_up, dtype, buffers[1]) : nullptr) {
    if (dtype == TILEMOE_FLOAT32) return;
    to_float(at.H_gate, dtype, 1, gate, columns);
    if (up) to_float(at.H_up, dtype, 1, up, columns);
  }
  // Codes: those of row `r` from column `first` on.
  RowOfH(const ActivationGradient& step, int64_t r, int64_t first, int64_t columns)
      : gate(buffers[0]), up(buffers[1]) {
    for (int half = 0; half < 2; ++half)
      read_codes_of_H(step.H_codes, step.experts->n, r, half, first, columns, step.experts->dtype,
                      buffers[half]);
  }
};

float differentiate(const tilemoe_experts& experts, const RowPlaces& at, const RowOfH& H,
                    const float* dA, float score, int64_t columns) {
  const tilemoe_dtype dtype = experts.dtype;
  alignas(64) float buffers[3][kDsColumns];
  const ActivationGradientRow row{
      .gate = H.gate,
      .up = H.up,
      .dA = dA,
      .score = score,
      .d_gate = at.dH_gate ? as_float(at.dH_gate, dtype, buffers[0]) : nullptr,
      .d_up = at.dH_up ? as_float(at.dH_up, dtype, buffers[1]) : nullptr,
      .A_scaled = at.A_scaled ? as_float(at.A_scaled, dtype, buffers[2]) : nullptr};
  const float ds = activate_gradient(experts, row, columns);
  store_unless_in_place(row.d_gate, at.dH_gate, dtype, columns);
  store_unless_in_place(row.d_up, at.dH_up, dtype, columns);
  store_unless_in_place(row.A_scaled, at.A_scaled, dtype, columns);
  return ds;
}

void differentiate_tile(const ActivationGradient& step, const RowTile& tile, int64_t first,
                        int64_t columns, const WorkerScratch& scratch) {
  const tilemoe_experts& experts = *step.experts;
  const bool gated = tilemoe_activation_gated(experts.activation) != 0;

  if (step.dO_codes.given()) {
    const Fp8Tile dO{step.dO_codes, experts.d, step.rows.token, tile.first};
    const Fp8Operand W2{.weight = &step.codes.weight,
                        .rows = experts.n,
                        .width = experts.d,
                        .expert = tile.expert,
                        .first = first};
    multiply_fp8(tile.rows, columns, dO, W2, /*add=*/false, scratch.tile, columns);
  } else {
    const Matrix dO = row_matrix(step.dO, step.rows.token).at(tile.first, 0);
    const Matrix W2 = expert_matrix(step.W2, tile.expert).at(0, first);
    multiply(tile.rows, columns, experts.d, dO, W2, /*add=*/false, scratch.tile, columns,
             scratch.panels);
  }
  add_adapter(step.adapter, tile.expert, tile.first, tile.rows, first, columns, scratch.tile,
              columns, scratch.panels);

  const bool H_is_codes = step.H_codes.given();
  const Matrix H = H_is_codes ? Matrix{} : row_matrix(step.H);
  const Matrix dH = step.dH.ndim ? row_matrix(step.dH) : Matrix{};
  const Matrix A_scaled = step.A_scaled.ndim ? row_matrix(step.A_scaled) : Matrix{};
  for (int64_t i = 0; i < tile.rows; ++i) {
    const int64_t r = tile.first + i;
    const float score = step.rows.score ? step.rows.score[r] : 1.0f;
    for (int64_t j = 0; j < columns; j += kDsColumns) {
      const int64_t gate = first + j, up = experts.n + gate;
      const int64_t count = std::min(kDsColumns, columns - j);
      const RowPlaces places{.H_gate = H_is_codes ? nullptr : H.at(r, gate).data,
                             .H_up = gated && !H_is_codes ? H.at(r, up).data : nullptr,
                             .dH_gate = dH.data ? dH.at(r, gate).data : nullptr,
                             .dH_up = dH.data && gated ? dH.at(r, up).data : nullptr,
                             .A_scaled = A_scaled.data ? A_scaled.at(r, gate).data : nullptr};
      const RowOfH row =
          H_is_codes ? RowOfH(step, r, gate, count) : RowOfH(places, experts.dtype, count);
      const float ds =
          differentiate(experts, places, row, scratch.tile + i * columns + j, score, count);
      if (step.ds_partial) step.ds_partial[gate / kDsColumns * step.rows.capacity + r] = ds;
    }
  }
}

}  // namespace

void activation_gradient(const ActivationGradient& step) {
  for_each_tile(step, step.experts->n, kInnerColumns, differentiate_tile);
}

}  // namespace tilemoe::cpu
