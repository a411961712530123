// The activations and their gradients, by rows in float32. Every `count` is a multiple of 8.
#pragma once

#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

// A = act(gate, up); `up` is null without a gate, and `gate` then is all of H. A may lie
// over `gate`.
void activate(const tilemoe_experts& experts, const float* gate, const float* up, float* A,
              int64_t count);

struct ActivationGradientRow {
  const float* gate;  // H
  const float* up;    // null without a gate
  const float* dA;    // dA' = dO W2, before the score
  float score;        // s
  float* d_gate;      // out dH = act'(H) (s dA'); null: not wanted; may lie over gate
  float* d_up;        // the same for up
  float* A_scaled;    // out A' = s A; null: not wanted
};
// Returns <dA', A>, the row's part of ds.
float activate_gradient(const tilemoe_experts& experts, const ActivationGradientRow& row,
                        int64_t count);

}  // namespace tilemoe::cpu
