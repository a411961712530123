// P or Q of an adapter: rows times a factor. A task is a tile of an expert's rows by a range of the
// rank.
#include "cpu/cpu_backend.h"
#include "cpu/gemm.h"
#include "cpu/matrix.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

void project(const LoraProjection& step, const RowTile& tile, int64_t first, int64_t columns,
             const WorkerScratch& scratch) {
  const Matrix source = row_matrix(step.source, step.rows.token).at(tile.first, 0);
  const Matrix factor = expert_matrix(step.factor, tile.expert).at(first, 0);
  const OutputTile out(row_matrix(step.out).at(tile.first, first), tile.rows, columns,
                       scratch.tile);
  multiply(tile.rows, columns, step.source.shape[1], source, factor.transposed(), /*add=*/false,
           out.data(), out.row_stride(), scratch.panels);
  out.store(/*add=*/false);
}

}  // namespace

void lora_projection(const LoraProjection& step) {
  for_each_tile(step, step.out.shape[1], kOuterColumns, project);
  if (step.gradient.parts == 0) return;
  LoraGradient gradient = step.gradient;
  gradient.scratch = step.scratch;
  lora_gradient(gradient);
}

// The gradient follows Q, and its scratch begins with that of any step.
size_t lora_Q_scratch_bytes(const tilemoe_experts& experts, const ScratchSizes& sizes) {
  return lora_gradient_scratch_bytes(experts, sizes);
}

}  // namespace tilemoe::cpu
