// dX~ = dH W1, summed over gate and up columns of dH.
#pragma once

#include "cuda/core/up_columns.h"
#include "cuda/step/row_product.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

template <class Kit, Variant kVariant, TileConfiguration kTile>
void run(const InputGradient& step) {
  using Shape = typename Kit::template Shape<kVariant, kTile>;
  using dH = typename Kit::template PartRows<Shape>;
  using W1 = typename Kit::template SummedWeights<Shape, kVariant.weights>;
  using Epilogue = typename Kit::template Store<Shape>;
  using Product = RowProduct<Kit, Shape, dH, W1, Epilogue>;
  const tilemoe_experts& experts = *step.experts;
  const UpWeights& from = step.weights;
  const UpParts parts =
      up_parts(experts, from.W1, from.W1_up, has_adjacent_columns(experts, from.W1));
  typename Product::Params params{.a = dH::params(step.dH, parts.count, parts.columns),
                                  .b = W1::params(parts),
                                  .epilogue = Epilogue::params(step.dX_rows, {})};
  run_over_rows<Kit, Product>(params, step, step.dX_rows.shape[1],
                              parts.count * k_blocks<Shape>(parts.columns));
}

}  // namespace tilemoe::cuda
