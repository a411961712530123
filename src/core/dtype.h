// From a dtype to the C++ type of its elements. A dispatch lists every type that it has code for,
// and rejects any other type by name.
#pragma once

#include <cstdint>
#include <type_traits>

#include "core/check.h"
#include "core/numbers.h"

namespace tilemoe {

template <class Element>
inline constexpr tilemoe_dtype kDTypeOf = Element::kNoDType;
template <>
inline constexpr tilemoe_dtype kDTypeOf<float> = TILEMOE_FLOAT32;
template <>
inline constexpr tilemoe_dtype kDTypeOf<BFloat16> = TILEMOE_BFLOAT16;
template <>
inline constexpr tilemoe_dtype kDTypeOf<Float16> = TILEMOE_FLOAT16;
template <>
inline constexpr tilemoe_dtype kDTypeOf<int32_t> = TILEMOE_INT32;
template <>
inline constexpr tilemoe_dtype kDTypeOf<int64_t> = TILEMOE_INT64;

// Error(kUnsupported): "int32 is none of float32, bfloat16".
template <class... Elements>
[[noreturn]] void refuse_dtype(tilemoe_dtype dtype) {
  Text names;
  const char* separator = "";
  ((names << separator << tilemoe_dtype_name(kDTypeOf<Elements>), separator = ", "), ...);
  TILEMOE_CHECK_SUPPORTED(false, tilemoe_dtype_name(dtype) << " is none of " << names.str());
}

// Returns body.operator()<Element>() for the one of `Elements` that `dtype` names. The result has
// the same type for every element, for example a kernel:
//   with_one_of<float, BFloat16>(dtype, [&]<class Element>() { return &kernel<Element>; })
// With [] instead of [&] nvcc warns of the lambda's conversion to a function pointer.
template <class... Elements, class Body>
auto with_one_of(tilemoe_dtype dtype, const Body& body) {
  using Result = std::common_type_t<decltype(body.template operator()<Elements>())...>;
  static_assert((std::is_same_v<Result, decltype(body.template operator()<Elements>())> && ...));
  if constexpr (std::is_void_v<Result>) {
    const bool found =
        ((dtype == kDTypeOf<Elements> && (body.template operator()<Elements>(), true)) || ...);
    if (!found) refuse_dtype<Elements...>(dtype);
  } else {
    Result result{};
    const bool found =
        ((dtype == kDTypeOf<Elements> && (result = body.template operator()<Elements>(), true)) ||
         ...);
    if (!found) refuse_dtype<Elements...>(dtype);
    return result;
  }
}

// The types of logits, scores and gradients.
template <class Body>
auto with_float(tilemoe_dtype dtype, const Body& body) {
  return with_one_of<float, BFloat16, Float16>(dtype, body);
}
// The types of ids and counts.
template <class Body>
auto with_integer(tilemoe_dtype dtype, const Body& body) {
  return with_one_of<int32_t, int64_t>(dtype, body);
}

}  // namespace tilemoe
