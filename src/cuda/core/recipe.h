// What the numbers of a product are: its operands, what it stores, and the scales of either. They
// are apart, so that a recipe of 8-bit operands is a recipe and not a second kernel.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/core/recipe_name.h"

namespace tilemoe::cuda {

// Operands without scales.
struct Unscaled {};

template <class A_, class B_, class Out_, class Scale_ = Unscaled>
struct Recipe {
  using A = A_;
  using B = B_;
  using Out = Out_;
  using Scale = Scale_;
};

template <RecipeName kName>
struct RecipeOf;
template <>
struct RecipeOf<RecipeName::kBF16> {
  using type = Recipe<__nv_bfloat16, __nv_bfloat16, __nv_bfloat16>;
};
template <>
struct RecipeOf<RecipeName::kF16> {
  using type = Recipe<__half, __half, __half>;
};

}  // namespace tilemoe::cuda
