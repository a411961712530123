// The activations, each stated once: A from the gate and up columns of H, or from its one column,
// and A with the slopes there. NaN passes through; relative accuracy holds in the negative tail
// (SwiGLU: down to a gate of -41).
#pragma once

#include <limits>

#include "core/activation_kinds.h"
#include "cuda/core/variant.h"
#include "cuda/ptx/warp.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

namespace activation {

constexpr float kLog2E = 1.44269504f;

// ---- of one column: f(x), and f(x, slope) with the slope at x

// x sigmoid(alpha x), as one exponential and one reciprocal.
struct SiLU {
  float alpha = 1.f;
  __device__ float operator()(float x) const { return __fdividef(x, 1.f + exponential(x)); }
  __device__ float operator()(float x, float& slope) const {
    const float gate = __fdividef(1.f, 1.f + exponential(x));
    slope = fmaf(gate * (1.f - gate), alpha * x, gate);
    return x * gate;
  }

 private:
  __device__ float exponential(float x) const { return ptx::exp2_approx(-kLog2E * alpha * x); }
};

// x Phi(x), Phi the normal distribution.
struct GELU {
  __device__ float operator()(float x) const {
    float bell;
    return x * distribution(x, bell);
  }
  __device__ float operator()(float x, float& slope) const {
    float bell;
    const float phi = distribution(x, bell);
    slope = fmaf(x, bell * 0.398942280f, phi);  // the density is bell / sqrt(2 pi)
    return x * phi;
  }

 private:
  // Phi(x), and bell = exp(-x^2 / 2). Phi(-t) exp(t^2 / 2) as y P(y), y = 1 / (1 + 0.35 t): the
  // polynomial of cpu/activation_functions-inl.h, where its error is stated.
  __device__ __forceinline__ static float distribution(float x, float& bell) {
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
};

// x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3)
struct GELUTanh {
  __device__ float operator()(float x) const { return __fdividef(x, 1.f + exponential(x)); }
  __device__ float operator()(float x, float& slope) const {
    const float gate = __fdividef(1.f, 1.f + exponential(x));
    slope = fmaf(x * fmaf(x * x, 3.f * kCubic, kLinear) * gate, 1.f - gate, gate);
    return x * gate;
  }

 private:
  static constexpr float kLinear = 1.59576912f, kCubic = kLinear * 0.044715f;  // 2 sqrt(2 / pi)
  __device__ static float exponential(float x) {
    const float u2 = x * fmaf(x * x, kCubic, kLinear);
    return ptx::exp2_approx(-kLog2E * u2);
  }
};

// 1 / (1 + exp(-x)), of exp(-|x|): so the slope, sigmoid(x) sigmoid(-x), keeps its digits at both
// ends.
struct Sigmoid {
  __device__ float operator()(float x) const {
    float slope;
    return (*this)(x, slope);
  }
  __device__ float operator()(float x, float& slope) const {
    const float decay = ptx::exp2_approx(-kLog2E * fabsf(x));
    const float larger = ptx::reciprocal_approx(1.f + decay), smaller = decay * larger;
    slope = larger * smaller;
    return x < 0.f ? smaller : larger;
  }
};

struct ReLU {
  __device__ float operator()(float x) const { return x <= 0.f ? 0.f : x; }
  __device__ float operator()(float x, float& slope) const {
    slope = x <= 0.f ? 0.f : 1.f;
    return (*this)(x);
  }
};

struct ReLUSquared {
  __device__ float operator()(float x) const { return ReLU()(x) * ReLU()(x); }
  __device__ float operator()(float x, float& slope) const {
    const float positive = ReLU()(x);
    slope = 2.f * positive;
    return positive * positive;
  }
};

struct Identity {
  __device__ float operator()(float x) const { return x; }
  __device__ float operator()(float x, float& slope) const {
    slope = 1.f;
    return x;
  }
};

// ---- of a column of H, or of its gate and up: f(gate, up), and f(gate, up, gate_slope, up_slope)

template <class Function>
struct Plain {
  Function f;
  __device__ float operator()(float h, float) const { return f(h); }
  __device__ float operator()(float h, float, float& slope, float&) const { return f(h, slope); }
};

template <class Function>
struct Gated {
  Function f;
  __device__ float operator()(float gate, float up) const { return f(gate) * up; }
  __device__ float operator()(float gate, float up, float& gate_slope, float& up_slope) const {
    up_slope = f(gate, gate_slope);
    gate_slope *= up;
    return up_slope * up;
  }
};

// gpt-oss: silu(min(gate, clamp)) (clip(up, -clamp, clamp) + up_shift). NaN is not clamped, and
// nothing flows back through what was.
struct ClampedSwiGLU {
  float clamp, alpha, up_shift;
  __device__ float operator()(float gate, float up) const {
    gate = gate > clamp ? clamp : gate;
    up = up > clamp ? clamp : up < -clamp ? -clamp : up;
    return SiLU{alpha}(gate) * (up + up_shift);
  }
  __device__ float operator()(float gate, float up, float& gate_slope, float& up_slope) const {
    const bool gate_clamped = gate > clamp, up_clamped = fabsf(up) > clamp;
    const float A = Gated<SiLU>{{alpha}}(gate_clamped ? clamp : gate,
                                         (up_clamped ? copysignf(clamp, up) : up) + up_shift,
                                         gate_slope, up_slope);
    if (gate_clamped) gate_slope = 0.f;
    if (up_clamped) up_slope = 0.f;
    return A;
  }
};

// Kimi K3's SiTU-GLU: 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25)
struct SiTUGLU {
  __device__ float operator()(float gate, float up) const {
    float gate_slope, up_slope;
    return (*this)(gate, up, gate_slope, up_slope);
  }
  __device__ float operator()(float gate, float up, float& gate_slope, float& up_slope) const {
    float sigmoid_slope;
    const float sigmoid = Sigmoid()(gate, sigmoid_slope);
    const float capped = softcap<4>(gate, gate_slope), capped_up = softcap<25>(up, up_slope);
    gate_slope = fmaf(gate_slope, sigmoid, capped * sigmoid_slope) * capped_up;
    up_slope *= capped * sigmoid;
    return capped * sigmoid * capped_up;
  }

 private:
  // cap tanh(y), y = x / cap, of exp(-2 |y|). Near 0, where the difference 2 cap / (1 + exp(-2 |y|))
  // - cap would lose its digits, it is x up to a relative error of 2^-15.
  template <int kCap>
  __device__ static float softcap(float x, float& slope) {
    const float decay = ptx::exp2_approx(-2.f / kCap * kLog2E * fabsf(x));
    const float reciprocal = ptx::reciprocal_approx(1.f + decay);
    slope = 4.f * decay * reciprocal * reciprocal;
    const float capped = copysignf(fmaf(2 * kCap, reciprocal, -kCap), x);
    return fabsf(x) < kCap * 0x1p-7f ? x : capped;
  }
};

// Plain SwiGLU, of two neighbouring columns with one reciprocal, 1 / (p q): exponentials and
// reciprocals are what takes the time. The bound keeps p q finite; below a gate of -41, where it is
// met, A is gate up 2^-60 instead of less.
struct SwiGLU {
  // Two of A take the gates' places.
  __device__ void two(float& gate0, float& gate1, float up0, float up1) const {
    const float p = 1.f + exponential(gate0), q = 1.f + exponential(gate1);
    const float r = ptx::reciprocal_approx(p * q);
    gate0 *= up0 * (r * q);
    gate1 *= up1 * (r * p);
  }
  __device__ void two(float2 gate, float2 up, float2& A, float2& gate_slope,
                      float2& up_slope) const {
    const float p = 1.f + exponential(gate.x), q = 1.f + exponential(gate.y);
    const float r = ptx::reciprocal_approx(p * q);
    one(gate.x, up.x, r * q, A.x, gate_slope.x, up_slope.x);
    one(gate.y, up.y, r * p, A.y, gate_slope.y, up_slope.y);
  }

 private:
  __device__ static float exponential(float gate) {
    return ptx::exp2_approx(fminf(-kLog2E * gate, 60.f));
  }
  __device__ static void one(float gate, float up, float sigmoid, float& A, float& gate_slope,
                             float& up_slope) {
    up_slope = gate * sigmoid;
    gate_slope = up * fmaf(up_slope, 1.f - sigmoid, sigmoid);
    A = up * up_slope;
  }
};

}  // namespace activation

// ---- which of them a launch has: the one place that names them all

static_assert(kActivationCount == 12, "a new activation has its line in with_activation() below");

// What is decided at run time, the same for every element of a launch.
struct ActivationParams {
  tilemoe_activation kind;
  float clamp;     // SwiGLU: infinity where there is none
  float alpha;     // SwiGLU: 1 in the plain form
  float up_shift;  // SwiGLU
  bool plain_swiglu;
};

inline ActivationParams activation_params(const tilemoe_experts& experts) {
  return {.kind = experts.activation,
          .clamp = experts.clamp != 0 ? experts.clamp : std::numeric_limits<float>::infinity(),
          .alpha = experts.alpha != 0 ? experts.alpha : 1.f,
          .up_shift = experts.up_shift,
          .plain_swiglu = is_plain_swiglu(experts)};
}

// Calls body(f) with one of the above; one branch outside the loop over elements. kTwo: the body
// takes two neighbouring columns at a time, as plain SwiGLU has them, in whatever kernel.
template <Activations kSet, bool kTwo = true, class Body>
__device__ __forceinline__ void with_activation(const ActivationParams& params, const Body& body) {
  using namespace activation;
  if constexpr (kSet == Activations::kSwiGLU) {
    body(SwiGLU());
  } else if constexpr (kSet == Activations::kClampedSwiGLU) {
    body(ClampedSwiGLU{params.clamp, params.alpha, params.up_shift});
  } else if constexpr (kSet == Activations::kGated) {
    switch (params.kind) {
      case TILEMOE_SWIGLU:
        if constexpr (kTwo)
          if (params.plain_swiglu) return body(SwiGLU());
        body(ClampedSwiGLU{params.clamp, params.alpha, params.up_shift});
        break;
      case TILEMOE_GEGLU: body(Gated<GELU>()); break;
      case TILEMOE_GEGLU_TANH: body(Gated<GELUTanh>()); break;
      case TILEMOE_GLU: body(Gated<Sigmoid>()); break;
      case TILEMOE_SITU_GLU: body(SiTUGLU()); break;
      default: body(Gated<ReLU>()); break;  // ReGLU
    }
  } else {
    switch (params.kind) {
      case TILEMOE_SILU: body(Plain<SiLU>()); break;
      case TILEMOE_GELU: body(Plain<GELU>()); break;
      case TILEMOE_GELU_TANH: body(Plain<GELUTanh>()); break;
      case TILEMOE_RELU: body(Plain<ReLU>()); break;
      case TILEMOE_RELU_SQUARED: body(Plain<ReLUSquared>()); break;
      default: body(Plain<Identity>()); break;
    }
  }
}

}  // namespace tilemoe::cuda
