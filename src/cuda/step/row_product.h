// What the products over rows grouped by expert share: all but the weight gradients.
#pragma once

#include "backend.h"
#include "cuda/schedule/row_tiles.h"  // column_group()

namespace tilemoe::cuda {

template <class Kit, class Shape, class A, class B, class Epilogue>
using RowProduct =
    typename Kit::template Product<Shape, A, B, Epilogue, typename Kit::template RowOrder<Shape>>;

// Of `columns` columns, as the epilogue counts them, in `k_blocks` blocks of the sum.
template <class Kit, class Product, class Step>
void run_over_rows(typename Product::Params& params, const Step& step, int64_t columns,
                   int64_t k_blocks) {
  using Order = typename Product::Order;
  constexpr int kColumns = Product::Epilogue::kColumns;
  const int64_t n_blocks = (columns + kColumns - 1) / kColumns;
  params.order = Order::params(step.rows, n_blocks, k_blocks, column_group(step.tuning));
  Kit::template launch<Product>(params, Order::at_most(step.rows, n_blocks), step.stream,
                                step.tuning);
}

template <class Shape>
int64_t k_blocks(int64_t sum) {
  return (sum + Shape::BLOCK_K - 1) / Shape::BLOCK_K;
}

}  // namespace tilemoe::cuda
