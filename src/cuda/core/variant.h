// What a kernel of a product is made for, beside its tile.
#pragma once

#include "cuda/core/major.h"
#include "cuda/core/recipe_name.h"

namespace tilemoe::cuda {

// Which activations a kernel has in it. Each takes instructions in every kernel that has it.
enum class Activations { kSwiGLU, kGated, kPlain };

// A field that a step leaves no choice of keeps its default.
struct Variant {
  RecipeName recipe = RecipeName::kBF16;
  Major weights = Major::kK;                      // of the operand that is weights
  Activations activations = Activations::kPlain;  // of a step that has them
  bool adjacent = false;   // up-projection: gate and up of a column of A are neighbours in W1
  bool gathers = true;     // up-projection: rows may come by a token list
  bool float_out = false;  // weight gradients: written in float32
  OutputMajor out = OutputMajor::kRow;  // weight gradients
  bool operator==(const Variant&) const = default;
};

}  // namespace tilemoe::cuda
