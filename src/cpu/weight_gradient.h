// What both weight gradients share: per expert, the sum over its rows of outer products.
#pragma once

#include "backend.h"
#include "cpu/matrix.h"
#include "cpu/thread_pool.h"
#include "cpu/tiles.h"

namespace tilemoe::cpu {

// out (rows, columns) = [out +] left^T right, summed over some rows of `left` and `right`.
struct OuterProduct {
  Matrix left;   // (M, rows)
  Matrix right;  // (M, columns)
  Matrix out;    // (rows, columns)
  int64_t rows, columns;

  // The same, transposed where the rows of `out` are not contiguous.
  OuterProduct along_out() const {
    if (out.rows_are_contiguous()) return *this;
    return {right, left, out.transposed(), columns, rows};
  }
};

// One task: `rows` by `columns` of one product.
struct GradientTile {
  int64_t rows, columns;
};

// The largest tile with which no task has more than an eighth of the work, down to 128 by 128: the
// more one expert has of all rows, the finer its products are cut. Products with long rows are the
// faster ones.
GradientTile gradient_tile(const Rows& rows, const OuterProduct& product);

// The tile of `product` that begins at element (i, j), over the rows [first, first + count) of
// `left` and `right`. No rows: zero, or nothing to add.
void sum_tile(const OuterProduct& product, int64_t first, int64_t count, int64_t i, int64_t j,
              const GradientTile& tile, bool accumulate, const WorkerScratch& scratch);

// Sums product_of(expert), alike for every expert, over the expert's rows. A task is a tile of one
// expert's product.
template <class ProductOf>
void sum_outer_products(const Rows& rows, bool accumulate, const StepScratch& scratch,
                        ProductOf&& product_of) {
  const OuterProduct any = product_of(0).along_out();
  const GradientTile tile = gradient_tile(rows, any);
  const int64_t tiles_across = tile_count(any.columns, tile.columns);
  const int64_t tiles = tile_count(any.rows, tile.rows) * tiles_across;
  parallel_for(rows.E * tiles, [&](int64_t task, int worker) {
    const int64_t expert = task / tiles;
    const int64_t first = rows.offsets[expert];
    const int64_t i = task % tiles / tiles_across * tile.rows;
    const int64_t j = task % tiles % tiles_across * tile.columns;
    sum_tile(product_of(expert).along_out(), first, rows.offsets[expert + 1] - first, i, j, tile,
             accumulate, scratch.worker(worker));
  });
}

}  // namespace tilemoe::cpu
