// Activations of float32 accumulators: A from the gate and up columns of H, or from its one column.
// NaN passes through; relative accuracy holds in the negative tail (SwiGLU: down to a gate of -41).
#pragma once

#include "cuda/ptx/exp2.h"
#include "cuda/ptx/reciprocal.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

// What is decided at run time, the same for every element of a launch.
struct ActivationParams {
  tilemoe_activation kind;
  float clamp;     // SwiGLU: infinity where there is none
  float alpha;     // SwiGLU: 1 in the plain form
  float up_shift;  // SwiGLU
};

namespace activation {

constexpr float kLog2E = 1.44269504f;

// x sigmoid(alpha x), as one exponential and one reciprocal.
__device__ __forceinline__ float silu(float x, float alpha = 1.f) {
  return __fdividef(x, 1.f + ptx::exp2_approx(-kLog2E * alpha * x));
}
// Phi(x), the normal distribution, and bell = exp(-x^2 / 2). Phi(-t) exp(t^2 / 2) as y P(y),
// y = 1 / (1 + 0.35 t): the polynomial of cpu/activation_functions-inl.h, where its error is
// stated.
__device__ __forceinline__ float normal_distribution(float x, float& bell) {
  const float y = __fdividef(1.f, fmaf(fabsf(x), 0.35f, 1.f));
  float p = -0.0291580297f;
  p = fmaf(p, y, 0.144031614f);
  p = fmaf(p, y, -0.255840391f);
  p = fmaf(p, y, 0.159321249f);
  p = fmaf(p, y, -0.0232133921f);
  p = fmaf(p, y, 0.105552927f);
  p = fmaf(p, y, 0.119821183f);
  p = fmaf(p, y, 0.139863536f);
  p = fmaf(p, y, 0.139621302f);
  bell = ptx::exp2_approx(x * x * (-0.5f * kLog2E));
  const float tail = bell * p * y;
  return x < 0.f ? tail : 1.f - tail;
}
// x Phi(x)
__device__ __forceinline__ float gelu(float x) {
  float bell;
  return x * normal_distribution(x, bell);
}
// x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
__device__ __forceinline__ float gelu_tanh(float x) {
  const float u2 = x * fmaf(x * x, 1.59576912f * 0.044715f, 1.59576912f);
  return __fdividef(x, 1.f + ptx::exp2_approx(-kLog2E * u2));
}
__device__ __forceinline__ float relu(float x) {
  return x <= 0.f ? 0.f : x;
}

struct SwiGLU {
  // Two gates become two of A with one reciprocal, 1 / (p q): exponentials and reciprocals are what
  // takes the time. The bound keeps p q finite; below a gate of -41, where it is met, A is
  // gate up 2^-60 instead of less.
  __device__ void two(float& gate0, float& gate1, float up0, float up1) const {
    const float p = 1.f + ptx::exp2_approx(fminf(-kLog2E * gate0, 60.f));
    const float q = 1.f + ptx::exp2_approx(fminf(-kLog2E * gate1, 60.f));
    const float r = ptx::reciprocal_approx(p * q);
    gate0 *= up0 * (r * q);
    gate1 *= up1 * (r * p);
  }
};

// gpt-oss: silu(min(gate, clamp)) (clip(up, -clamp, clamp) + up_shift). NaN is not clamped.
struct ClampedSwiGLU {
  float clamp, alpha, up_shift;
  __device__ float operator()(float gate, float up) const {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
    return silu(gate, alpha) * (up + up_shift);
  }
};

}  // namespace activation

// Which activations a kernel has in it. Each takes instructions in every kernel that has it.
enum class Activations { kSwiGLU, kGated, kPlain };

// Calls body(f) with f(gate, up), or f(h, anything) where there is no gate; one branch outside the
// loop over elements.
template <Activations kSet, class Body>
__device__ __forceinline__ void with_activation(const ActivationParams& params, const Body& body) {
  using namespace activation;
  static_assert(kSet != Activations::kSwiGLU, "has an epilogue of its own");
  if constexpr (kSet == Activations::kGated) {
    switch (params.kind) {
      case TILEMOE_SWIGLU: body(ClampedSwiGLU{params.clamp, params.alpha, params.up_shift}); break;
      case TILEMOE_GEGLU: body([](float g, float u) { return gelu(g) * u; }); break;
      case TILEMOE_GEGLU_TANH: body([](float g, float u) { return gelu_tanh(g) * u; }); break;
      default: body([](float g, float u) { return relu(g) * u; }); break;  // ReGLU
    }
  } else {
    switch (params.kind) {
      case TILEMOE_SILU: body([](float h, float) { return silu(h); }); break;
      case TILEMOE_GELU: body([](float h, float) { return gelu(h); }); break;
      case TILEMOE_GELU_TANH: body([](float h, float) { return gelu_tanh(h); }); break;
      case TILEMOE_RELU: body([](float h, float) { return relu(h); }); break;
      case TILEMOE_RELU_SQUARED: body([](float h, float) { return relu(h) * relu(h); }); break;
      default: body([](float h, float) { return h; }); break;  // identity
    }
  }
}

}  // namespace tilemoe::cuda
