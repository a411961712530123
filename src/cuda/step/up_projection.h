// H = X W1^T + b1, A = act(H): gathers X while it loads, and finishes A before it stores.
#pragma once

#include "cuda/core/up_columns.h"
#include "cuda/step/row_product.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

// Where gate and up are neighbours in W1, the product has 2n columns like any other, and its end
// makes a column of A of two.
template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const UpProjection& step) {
  using Shape = typename Kit::template Shape<kVariant, kTile>;
  using Epilogue =
      typename Kit::template Activation<Shape, kVariant.activations, kVariant.adjacent>;
  using X = typename Kit::template Rows<Shape, kVariant.gathers>;
  using W1 = typename Kit::template Weights<Shape, kVariant.weights, Epilogue::kParts>;
  using Product = RowProduct<Kit, Shape, X, W1, Epilogue>;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& from = step.weights;
  const UpParts weights = up_parts(experts, from.W1, from.W1_up, kVariant.adjacent);
  const UpParts biases = up_parts(experts, from.b1, from.b1_up, kVariant.adjacent);
  typename Product::Params params{.a = X::params(step.X, step.rows),
                                  .b = W1::params(weights.part),
                                  .epilogue = Epilogue::params(step.H, step.A, biases, experts)};
  run_over_rows<Kit, Product>(params, step, weights.columns, k_blocks<Shape>(experts.d));
}

}  // namespace tilemoe::cuda
