// The activations and their derivatives as formulas, in the precision of Real.
#pragma once

#include <algorithm>
#include <cmath>

#include "case.h"

namespace tilemoe::verify {

template <class Real>
struct ActivationValue {
  Real A;
  Real dgate;  // dA / dgate; without a gate dA / dh
  Real dup;    // dA / dup
};

namespace formula {

constexpr double kPi = 3.14159265358979323846;

template <class Real>
struct Value {
  Real f, derivative;
};

template <class Real>
Real sigmoid(Real x) {
  return 1 / (1 + std::exp(-x));
}

// x sigmoid(alpha x)
template <class Real>
Value<Real> silu(Real x, Real alpha = 1) {
  const Real s = sigmoid(alpha * x);
  return {x * s, s * (1 + alpha * x * (1 - s))};
}

// x Phi(x), Phi the normal distribution
template <class Real>
Value<Real> gelu(Real x) {
  const Real phi = std::exp(-x * x / 2) / static_cast<Real>(std::sqrt(2 * kPi));
  const Real Phi = std::erfc(-x / static_cast<Real>(std::sqrt(2.0))) / 2;
  return {x * Phi, Phi + x * phi};
}

// x (1 + tanh(u)) / 2 with u = sqrt(2 / pi) (x + 0.044715 x^3); (1 + tanh(u)) / 2 = sigmoid(2u)
template <class Real>
Value<Real> gelu_tanh(Real x) {
  const Real scale = static_cast<Real>(std::sqrt(2 / kPi)), cubic = static_cast<Real>(0.044715);
  const Real s = sigmoid(2 * scale * (x + cubic * x * x * x));
  const Real du = scale * (1 + 3 * cubic * x * x);
  return {x * s, s + x * s * (1 - s) * 2 * du};
}

template <class Real>
Value<Real> logistic(Real x) {
  return {sigmoid(x), sigmoid(x) * sigmoid(-x)};
}

template <class Real>
Value<Real> relu(Real x) {
  return x > 0 ? Value<Real>{x, 1} : Value<Real>{0, 0};
}

template <class Real>
Value<Real> relu_squared(Real x) {
  return x > 0 ? Value<Real>{x * x, 2 * x} : Value<Real>{0, 0};
}

// cap tanh(x / cap)
template <class Real>
Value<Real> softcap(Real cap, Real x) {
  return {cap * std::tanh(x / cap), 1 / (std::cosh(x / cap) * std::cosh(x / cap))};
}

}  // namespace formula

// gate * sigmoid(alpha gate) * (up + up_shift) of clamped gate and up. As in torch.clamp, the
// gradient passes at the clamp itself.
template <class Real>
ActivationValue<Real> swiglu(const Case& c, Real gate, Real up) {
  const Real clamp = static_cast<Real>(c.clamp), alpha = c.alpha == 0 ? Real{1} : Real{c.alpha};
  const bool gate_passes = clamp == 0 || !(gate > clamp);
  const bool up_passes = clamp == 0 || !(std::fabs(up) > clamp);
  if (!gate_passes) gate = clamp;
  if (!up_passes) up = std::copysign(clamp, up);
  const formula::Value<Real> value = formula::silu(gate, alpha);
  up += static_cast<Real>(c.up_shift);
  return {value.f * up, gate_passes ? value.derivative * up : 0, up_passes ? value.f : 0};
}

// 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25)
template <class Real>
ActivationValue<Real> situ_glu(Real gate, Real up) {
  const auto g = formula::softcap<Real>(4, gate), u = formula::softcap<Real>(25, up);
  const auto s = formula::logistic(gate);
  const Real slope = g.derivative * s.f + g.f * s.derivative;
  return {g.f * s.f * u.f, slope * u.f, g.f * s.f * u.derivative};
}

// `up` is not read if the activation has no gate.
template <class Real>
ActivationValue<Real> activate(const Case& c, Real gate, Real up) {
  const auto gated = [&](formula::Value<Real> value) -> ActivationValue<Real> {
    return {value.f * up, value.derivative * up, value.f};
  };
  const auto plain = [](formula::Value<Real> value) -> ActivationValue<Real> {
    return {value.f, value.derivative, 0};
  };
  switch (c.activation) {
    case Activation::kSwiGLU: return swiglu(c, gate, up);
    case Activation::kGeGLU: return gated(formula::gelu(gate));
    case Activation::kGeGLUTanh: return gated(formula::gelu_tanh(gate));
    case Activation::kReGLU: return gated(formula::relu(gate));
    case Activation::kSiLU: return plain(formula::silu(gate));
    case Activation::kGELU: return plain(formula::gelu(gate));
    case Activation::kGELUTanh: return plain(formula::gelu_tanh(gate));
    case Activation::kReLU: return plain(formula::relu(gate));
    case Activation::kReLUSquared: return plain(formula::relu_squared(gate));
    case Activation::kIdentity: return plain({gate, 1});
    case Activation::kGLU: return gated(formula::logistic(gate));
    case Activation::kSiTUGLU: return situ_glu(gate, up);
  }
  return {};
}

}  // namespace tilemoe::verify
