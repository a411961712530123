// Y = A W2^T + b2.
#pragma once

#include "cuda/step/row_product.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const DownProjection& step) {
  using Shape = typename Kit::template Shape<kVariant, kTile>;
  using A = typename Kit::template Rows<Shape, false>;
  using W2 = typename Kit::template Weights<Shape, kVariant.weights, 1>;
  using Epilogue = typename Kit::template Store<Shape>;
  using Product = RowProduct<Kit, Shape, A, W2, Epilogue>;
  typename Product::Params params{.a = A::params(step.A, step.rows),
                                  .b = W2::params(&step.W2),
                                  .epilogue = Epilogue::params(step.Y, step.b2)};
  run_over_rows<Kit, Product>(params, step, step.Y.shape[1], k_blocks<Shape>(step.experts->n));
}

}  // namespace tilemoe::cuda
