// The numbers of a GEMM: the types of its operands and of its outputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "core/dtype.h"
#include "cuda/core/variant.h"

namespace tilemoe {

// From a dtype to the type that CUDA has for its elements, where these are 16 bits: matrices of
// rows and weights.

template <>
inline constexpr tilemoe_dtype kDTypeOf<__nv_bfloat16> = TILEMOE_BFLOAT16;
template <>
inline constexpr tilemoe_dtype kDTypeOf<__half> = TILEMOE_FLOAT16;

namespace cuda {

// Returns body.operator()<Element>() of the type that `dtype` names; refuses any but these two.
//   with_element(experts.dtype, [&]<class Element>() { run<Element>(params); });
template <class Body>
auto with_element(tilemoe_dtype dtype, const Body& body) {
  return with_one_of<__nv_bfloat16, __half>(dtype, body);
}

}  // namespace cuda

}  // namespace tilemoe

namespace tilemoe::cuda {

// What the numbers of a product are: its operands, what it stores, and the scales of either. They
// are apart, so that a recipe of 8-bit operands is a recipe and not a second kernel.

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
