// dX~ = dH W1. A task is a tile of an expert's rows by a range of dX~'s columns.
#include "cpu/cpu_backend.h"
#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

void project(const InputGradient& step, const RowTile& tile, int64_t first, int64_t columns,
             const WorkerScratch& scratch) {
  const tilemoe_experts& experts = *step.experts;
  const Matrix dH = row_matrix(step.dH).at(tile.first, 0);
  const OutputTile dX(row_matrix(step.dX_rows).at(tile.first, first), tile.rows, columns,
                      scratch.tile);
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
