// The Mixture-of-Experts layer in C++: forward, backward, inference, and the memory each needs.
// Semantics, shapes and errors are documented at the functions of the same name in tilemoe.h; every
// call throws tilemoe::Error on a bad argument, before anything is written.
#pragma once

#include "tilemoe/routing.h"

namespace tilemoe {

enum class Activation : int {
  kSwiGLU = TILEMOE_SWIGLU,
  kGeGLU = TILEMOE_GEGLU,
  kGeGLUTanh = TILEMOE_GEGLU_TANH,
  kReGLU = TILEMOE_REGLU,
  kSiLU = TILEMOE_SILU,
  kGELU = TILEMOE_GELU,
  kGELUTanh = TILEMOE_GELU_TANH,
  kReLU = TILEMOE_RELU,
  kReLUSquared = TILEMOE_RELU_SQUARED,
  kIdentity = TILEMOE_IDENTITY,
};

enum class GateLayout : int {
  kConcatenated = TILEMOE_GATE_CONCATENATED,
  kInterleaved = TILEMOE_GATE_INTERLEAVED,
  kSplit = TILEMOE_GATE_SPLIT,
};

enum class Pass : int {
  kInference = TILEMOE_PASS_INFERENCE,
  kForward = TILEMOE_PASS_FORWARD,
  kBackward = TILEMOE_PASS_BACKWARD,
  kBackwardDhOverH = TILEMOE_PASS_BACKWARD_DH_OVER_H,
  kBackwardRest = TILEMOE_PASS_BACKWARD_REST,
};

struct Weights : tilemoe_weights {
  Weights() : tilemoe_weights{} {}
};

struct Saved : tilemoe_saved {
  Saved() : tilemoe_saved{} {}
  // H (capacity, 2n), or (capacity, n) where the activation is not gated
  explicit Saved(const Tensor& pre_activation) : tilemoe_saved{} { H = pre_activation; }
};

struct ForwardArgs : tilemoe_forward_args {
  ForwardArgs() : tilemoe_forward_args{} { struct_size = sizeof(tilemoe_forward_args); }
};

struct BackwardArgs : tilemoe_backward_args {
  BackwardArgs() : tilemoe_backward_args{} { struct_size = sizeof(tilemoe_backward_args); }
};

// What the experts compute, and on which device. A value without resources.
struct Experts : tilemoe_experts {
  Experts(int64_t width, int64_t inner_width, int64_t experts, DType type = DType::kFloat32,
          Activation act = Activation::kSwiGLU, GateLayout layout = GateLayout::kConcatenated,
          Device where = Device::kCpu)
      : tilemoe_experts{} {
    struct_size = sizeof(tilemoe_experts);
    device = to_c(where);
    dtype = to_c(type);
    d = width, n = inner_width, E = experts;
    activation = static_cast<tilemoe_activation>(act);
    gate_layout = static_cast<tilemoe_gate_layout>(layout);
  }

  bool gated() const { return tilemoe_activation_gated(activation) != 0; }
  // Columns of H: 2n, or n where the activation is not gated.
  int64_t h_width() const { return gated() ? 2 * n : n; }

  tilemoe_saved_size saved_bytes(const RoutingSpec& routing) const {
    tilemoe_saved_size size{};
    check(tilemoe_saved_bytes(this, &routing, &size));
    return size;
  }
  size_t workspace_bytes(const RoutingSpec& routing, Pass pass) const {
    size_t size = 0;
    check(tilemoe_workspace_bytes(this, &routing, static_cast<tilemoe_pass>(pass), &size));
    return size;
  }
  void forward(const ForwardArgs& args) const { check(tilemoe_forward(this, &args)); }
  void backward(const BackwardArgs& args) const { check(tilemoe_backward(this, &args)); }
};

}  // namespace tilemoe
