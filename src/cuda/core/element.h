// From a dtype to the type that CUDA has for its elements, where these are 16 bits: matrices of
// rows and weights.
#pragma once

#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "dtype.h"

namespace tilemoe {

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
