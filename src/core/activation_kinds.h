// The properties of the activations, and the list of all activations that follows from them.
#pragma once

#include <array>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

struct ActivationKind {
  const char* name;  // null: no such activation exists
  bool gated;
};

constexpr ActivationKind activation_kind(tilemoe_activation activation) {
  switch (activation) {
    case TILEMOE_SWIGLU: return {.name = "swiglu", .gated = true};
    case TILEMOE_GEGLU: return {.name = "geglu", .gated = true};
    case TILEMOE_GEGLU_TANH: return {.name = "geglu_tanh", .gated = true};
    case TILEMOE_REGLU: return {.name = "reglu", .gated = true};
    case TILEMOE_SILU: return {.name = "silu", .gated = false};
    case TILEMOE_GELU: return {.name = "gelu", .gated = false};
    case TILEMOE_GELU_TANH: return {.name = "gelu_tanh", .gated = false};
    case TILEMOE_RELU: return {.name = "relu", .gated = false};
    case TILEMOE_RELU_SQUARED: return {.name = "relu_squared", .gated = false};
    case TILEMOE_IDENTITY: return {.name = "identity", .gated = false};
    case TILEMOE_GLU: return {.name = "glu", .gated = true};
  }
  return {.name = nullptr, .gated = false};
}

// Plain SwiGLU: its sigmoid has no factor, and its columns are neither clamped nor shifted.
constexpr bool is_plain_swiglu(const tilemoe_experts& experts) {
  return experts.activation == TILEMOE_SWIGLU && experts.clamp == 0 && experts.alpha == 0 &&
         experts.up_shift == 0;
}

// Their numbers follow one another from 0.
constexpr int kActivationCount = [] {
  int count = 0;
  while (activation_kind(static_cast<tilemoe_activation>(count)).name) ++count;
  return count;
}();

constexpr auto kActivations = [] {
  std::array<tilemoe_activation, kActivationCount> all{};
  for (int i = 0; i < kActivationCount; ++i)
    all[static_cast<size_t>(i)] = static_cast<tilemoe_activation>(i);
  return all;
}();

}  // namespace tilemoe
