// dX~ = dH W1. A task is a tile of an expert's rows by a range of dX~'s columns.
#include "core/formats.h"
#include "cpu/cpu_backend.h"
#include "cpu/fp8_gemm.h"
#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

// The fp8 recipe: the gate part of dH, then the up part.
void add_parts(const InputGradient& step, const RowTile& tile, int64_t first, int64_t columns,
               const OutputTile& dX) {
  const int64_t n = step.experts->n, capacity = step.rows.capacity;
  const bool split = step.experts->gate_layout == TILEMOE_GATE_SPLIT;
  for (int64_t part = 0; part < 2; ++part) {
    const Fp8Rows codes{step.dH_codes.codes + part * capacity * n,
                        step.dH_codes.scales + part * capacity * blocks_of(n, kFp8Tile)};
    const Fp8Operand W1{.weight = split && part == 1 ? &step.codes.up : &step.codes.weight,
                        .rows = step.experts->d,
                        .width = n,
                        .expert = tile.expert,
                        .first = step.codes.first_row + first,
                        .column = split ? 0 : part * n,
                        .all_columns = split ? n : 2 * n};
    multiply_fp8(tile.rows, columns, {codes, n, nullptr, tile.first}, W1, /*add=*/part == 1,
                 dX.data(), dX.row_stride());
  }
}

void project(const InputGradient& step, const RowTile& tile, int64_t first, int64_t columns,
             const WorkerScratch& scratch) {
  const tilemoe_experts& experts = *step.experts;
  const OutputTile dX(row_matrix(step.dX_rows).at(tile.first, first), tile.rows, columns,
                      scratch.tile);
  if (step.dH_codes.given()) {
    add_parts(step, tile, first, columns, dX);
    return dX.store(/*add=*/false);
  }
  const Matrix dH = row_matrix(step.dH).at(tile.first, 0);
  bool add = false;  // the up part to the gate part
  for (const UpPart& part :
       up_parts(experts, step.weights.W1, step.weights.W1_up, tile.expert, 0, experts.n)) {
    multiply(tile.rows, columns, part.columns, dH.at(0, part.half * experts.n),
             part.weights.at(0, first), add, dX.data(), dX.row_stride(), scratch.panels);
    add = true;
  }
  add_adapter(step.adapter, tile.expert, tile.first, tile.rows, first, columns, dX.data(),
              dX.row_stride(), scratch.panels);
  dX.store(/*add=*/false);
}

}  // namespace

void input_gradient(const InputGradient& step) {
  for_each_tile(step, step.dX_rows.shape[1], kOuterColumns, project);
}

}  // namespace tilemoe::cpu
