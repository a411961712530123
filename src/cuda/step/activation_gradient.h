// dA' = dO W2, gathered, and from it and H: dH, A' and the partial sums of ds.
#pragma once

#include "cuda/core/up_columns.h"
#include "cuda/step/row_product.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const ActivationGradient& step) {
  using Shape = typename Kit::template Shape<kVariant, kTile>;
  using dO = typename Kit::template Rows<Shape, true>;
  using W2 = typename Kit::template Weights<Shape, kVariant.weights, 1>;
  using Epilogue = typename Kit::template ActivationGradient<Shape, kVariant.activations>;
  using Product = RowProduct<Kit, Shape, dO, W2, Epilogue>;
  const tilemoe_tensor weights = transposed(step.W2);
  typename Product::Params params{.a = dO::params(step.dO, step.rows),
                                  .b = W2::params(&weights),
                                  .epilogue = Epilogue::params(step)};
  run_over_rows<Kit, Product>(params, step, step.experts->n, k_blocks<Shape>(step.experts->d));
}

}  // namespace tilemoe::cuda
