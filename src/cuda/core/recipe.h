// The numbers of a GEMM: the types of its operands and of its outputs.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <cuda_fp8.h>

#include <type_traits>

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

// A recipe names the types of a GEMM's operands and of every output that an epilogue stores, and
// the K of an MMA instruction. Accumulators are float32.

template <class Element>
struct SixteenBit {
  using A = Element;
  using B = Element;
  static constexpr int kMmaK = 16;
  struct Out {
    using H = Element;        // pre-activations
    using A = Element;        // activations
    using Y = Element;        // outputs of the experts
    using dH = Element;       // gradient of H
    using AScaled = Element;  // A' = s A
    using dXRows = Element;   // input gradient, one row per pair
    using dW = Element;       // weight gradients (or float32)
  };
};
// The fp8 recipe: operands of e4m3 with block scales (core/fp8.h).
template <class Sixteen>
struct E4m3Blocks {
  using A = __nv_fp8_e4m3;
  using B = __nv_fp8_e4m3;
  static constexpr int kMmaK = 32;
  struct Out {
    using H = Sixteen;
    using A = __nv_fp8_e4m3;
    using Y = Sixteen;
    using dH = Sixteen;
    using AScaled = Sixteen;
    using dXRows = Sixteen;
  };
};
using BF16 = SixteenBit<__nv_bfloat16>;
using F16 = SixteenBit<__half>;

template <RecipeName kName>
struct RecipeOf;
template <>
struct RecipeOf<RecipeName::kBF16> {
  using type = BF16;
};
template <>
struct RecipeOf<RecipeName::kF16> {
  using type = F16;
};
template <>
struct RecipeOf<RecipeName::kFp8BF16> {
  using type = E4m3Blocks<__nv_bfloat16>;
};
template <>
struct RecipeOf<RecipeName::kFp8F16> {
  using type = E4m3Blocks<__half>;
};

// Whether an epilogue that stores outputs of these types can use one store for all of them.
template <class First, class... Others>
inline constexpr bool all_same = (std::is_same_v<First, Others> && ...);

}  // namespace tilemoe::cuda
