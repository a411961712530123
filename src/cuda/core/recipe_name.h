// The recipes by name, for the host: core/recipe.h says what each is.
#pragma once

#include "check.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

enum class RecipeName { kBF16, kF16 };

// Of experts of a dtype. Throws Error(kUnsupported) where there is none.
inline RecipeName recipe_of(tilemoe_dtype dtype) {
  switch (dtype) {
    case TILEMOE_BFLOAT16: return RecipeName::kBF16;
    case TILEMOE_FLOAT16: return RecipeName::kF16;
    default: break;
  }
  TILEMOE_CHECK_SUPPORTED(false, "products of " << tilemoe_dtype_name(dtype)
                                                << ": the CUDA backend has bfloat16 and float16");
}

}  // namespace tilemoe::cuda
