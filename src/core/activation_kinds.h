// The properties of the activations, made of the list in tilemoe/activations.inc.
#pragma once

#include <array>
#include <cstddef>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

struct ActivationKind {
  const char* name;  // null: no such activation exists
  bool gated;
};

// By their numbers, which follow one another from 0.
constexpr auto kActivationKinds = std::to_array<ActivationKind>({
#define TILEMOE_ACTIVATION(name, NAME, Name, gated, formula) {#name, gated},
#include "tilemoe/activations.inc"
#undef TILEMOE_ACTIVATION
});
constexpr auto kActivations = std::to_array<tilemoe_activation>({
#define TILEMOE_ACTIVATION(name, NAME, Name, gated, formula) TILEMOE_##NAME,
#include "tilemoe/activations.inc"
#undef TILEMOE_ACTIVATION
});
constexpr int kActivationCount = kActivations.size();

constexpr bool numbers_follow_one_another() {
  int number = 0;
  for (tilemoe_activation activation : kActivations)
    if (activation != number++) return false;
  return true;
}
static_assert(numbers_follow_one_another(), "the list has another order than tilemoe_activation");

constexpr ActivationKind activation_kind(tilemoe_activation activation) {
  if (activation < 0 || activation >= kActivationCount) return {.name = nullptr, .gated = false};
  return kActivationKinds[static_cast<size_t>(activation)];
}

// Plain SwiGLU: its sigmoid has no factor, and its columns are neither clamped nor shifted.
constexpr bool is_plain_swiglu(const tilemoe_experts& experts) {
  return experts.activation == TILEMOE_SWIGLU && experts.clamp == 0 && experts.alpha == 0 &&
         experts.up_shift == 0;
}

}  // namespace tilemoe
