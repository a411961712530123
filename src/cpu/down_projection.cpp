// Y = A W2^T + b2. A task is a tile of an expert's rows by a range of Y's columns.
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/fp8_gemm.h"
#include "cpu/gemm.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {
namespace {

void project(const DownProjection& step, const RowTile& tile, int64_t first, int64_t columns,
             const WorkerScratch& scratch) {
  const OutputTile Y(row_matrix(step.Y).at(tile.first, first), tile.rows, columns, scratch.tile);
  const int64_t n = step.experts->n;
  if (step.A_codes.given()) {
    const Fp8Tile A{step.A_codes, n, nullptr, tile.first};
    const Fp8Operand W2{.weight = &step.codes.weight,
                        .rows = step.experts->d,
                        .width = n,
                        .expert = tile.expert,
                        .first = step.codes.first_row + first};
    multiply_fp8(tile.rows, columns, A, W2, /*add=*/false, Y.data(), Y.row_stride());
  } else {
    const Matrix A = row_matrix(step.A).at(tile.first, 0);
    const Matrix W2 = expert_matrix(step.W2, tile.expert).at(first, 0);
    multiply(tile.rows, columns, n, A, W2.transposed(), /*add=*/false, Y.data(), Y.row_stride(),
             scratch.panels);
  }
  add_adapter(step.adapter, tile.expert, tile.first, tile.rows, first, columns, Y.data(),
              Y.row_stride(), scratch.panels);
  if (step.b2.ndim) {
    const Matrix b2 = expert_matrix(step.b2, tile.expert).at(first, 0);
    for (int64_t i = 0; i < tile.rows; ++i) add_scaled(b2.data, b2.dtype, 1.0f, Y.row(i), columns);
  }
  Y.store(/*add=*/false);
}

}  // namespace

void down_projection(const DownProjection& step) {
  for_each_tile(step, step.Y.shape[1], kOuterColumns, project);
}

}  // namespace tilemoe::cpu
