#include "cpu/weight_gradient.h"

#include <algorithm>

#include "cpu/gemm.h"

namespace tilemoe::cpu {

void multiply_tile(const OuterProduct& product, int64_t inner_tile, int64_t outer_tile,
                   const WorkerScratch& scratch) {
  const int64_t i = inner_tile * kGradientInner;
  const int64_t j = outer_tile * kGradientOuter;
  int64_t rows = std::min(kGradientInner, product.inner - i);
  int64_t columns = std::min(kGradientOuter, product.outer - j);
  Matrix left = product.left.at(0, i);
  Matrix right = product.right.at(0, j);
  Matrix out = product.out.at(i, j);
  if (!out.rows_are_contiguous()) {  // out^T = right^T left
    std::swap(left, right);
    std::swap(rows, columns);
    out = out.transposed();
  }
  const OutputTile tile(out, rows, columns, scratch.tile);
  if (product.rows == 0) {
    if (product.accumulate) return;
    for (int64_t row = 0; row < rows; ++row) std::fill_n(tile.row(row), columns, 0.0f);
  }
  bool add = product.accumulate && tile.in_place();
  for (int64_t first = 0; first < product.rows; first += kDepth) {
    const int64_t terms = std::min(kDepth, product.rows - first);
    multiply(rows, columns, terms, left.at(first, 0).transposed(), right.at(first, 0), add,
             tile.data(), tile.row_stride(), scratch.panels);
    add = true;
  }
  tile.store(product.accumulate);
}

}  // namespace tilemoe::cpu
