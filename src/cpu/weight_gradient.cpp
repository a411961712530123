#include "cpu/weight_gradient.h"

#include <algorithm>

#include "cpu/gemm.h"

namespace tilemoe::cpu {

GradientTile gradient_tile(const Rows& rows, const OuterProduct& product) {
  constexpr int64_t kShares = 8;
  constexpr GradientTile kTiles[] = {
      {kGradientTile, kGradientTile}, {256, 512}, {128, 512}, {128, 256}, {128, 128}};
  int64_t most_rows = 0;
  for (int64_t e = 0; e < rows.E; ++e)
    most_rows = std::max<int64_t>(most_rows, rows.offsets[e + 1] - rows.offsets[e]);
  const double all = static_cast<double>(rows.offsets[rows.E]) *
                     static_cast<double>(product.rows * product.columns);
  GradientTile tile{};
  for (const GradientTile& candidate : kTiles) {
    tile = {std::min(candidate.rows, product.rows), std::min(candidate.columns, product.columns)};
    const double one = static_cast<double>(most_rows * tile.rows * tile.columns);
    if (one * kShares <= all) break;
  }
  return tile;
}

void sum_tile(const OuterProduct& product, int64_t first, int64_t count, int64_t i, int64_t j,
              const GradientTile& size, bool accumulate, const WorkerScratch& scratch) {
  const int64_t rows = std::min(size.rows, product.rows - i);
  const int64_t columns = std::min(size.columns, product.columns - j);
  const OutputTile tile(product.out.at(i, j), rows, columns, scratch.tile);
  if (count == 0) {
    if (accumulate) return;
    for (int64_t row = 0; row < rows; ++row) std::fill_n(tile.row(row), columns, 0.0f);
  }
  bool add = accumulate && tile.in_place();
  for (int64_t done = 0; done < count; done += kDepth) {
    multiply(rows, columns, std::min(kDepth, count - done),
             product.left.at(first + done, i).transposed(), product.right.at(first + done, j), add,
             tile.data(), tile.row_stride(), scratch.panels);
    add = true;
  }
  tile.store(accumulate);
}

}  // namespace tilemoe::cpu
