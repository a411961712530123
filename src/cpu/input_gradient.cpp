// dX~ = dH W1. A task is a tile of an expert's rows by a range of dX~'s columns.
#include <algorithm>

#include "cpu/backend.h"
#include "cpu/gemm.h"
#include "cpu/row_tiles.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"
#include "cpu/up_weights.h"

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
  dX.store(/*add=*/false);
}

}  // namespace

void CpuBackend::input_gradient(const InputGradient& step) {
  const StepScratch scratch(*step.experts, step.rows.capacity, step.scratch);
  const RowTiles tiles(step.rows, kTileRows, scratch.row_tiles());
  const int64_t d = step.dX_rows.shape[1];
  const int64_t column_tiles = tile_count(d, kOuterColumns);
  parallel_for(tiles.count() * column_tiles, [&](int64_t task, int worker) {
    const int64_t first = task % column_tiles * kOuterColumns;
    project(step, tiles[task / column_tiles], first, std::min(kOuterColumns, d - first),
            scratch.worker(worker));
  });
}

}  // namespace tilemoe::cpu
