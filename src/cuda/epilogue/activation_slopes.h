// Activations with their slopes, from the stored H: f(gate, up, gate_slope, up_slope) returns A.
#pragma once

#include "cuda/epilogue/activation_functions.h"
#include "cuda/ptx/exp2.h"
#include "cuda/ptx/reciprocal.h"

namespace tilemoe::cuda {

namespace activation {

// Of one column: value, and the slope there.
struct SiLU {
  float alpha = 1.f;
  __device__ float operator()(float x, float& slope) const {
    const float gate = __fdividef(1.f, 1.f + ptx::exp2_approx(-kLog2E * alpha * x));
    slope = fmaf(gate * (1.f - gate), alpha * x, gate);
    return x * gate;
  }
};
struct GELU {
  __device__ float operator()(float x, float& slope) const {
    float bell;
    const float phi = normal_distribution(x, bell);
    slope = fmaf(x, bell * 0.398942280f, phi);  // the density is bell / sqrt(2 pi)
    return x * phi;
  }
};
struct GELUTanh {
  __device__ float operator()(float x, float& slope) const {
    constexpr float kLinear = 1.59576912f, kCubic = kLinear * 0.044715f;  // 2 sqrt(2 / pi)
    const float u2 = x * fmaf(x * x, kCubic, kLinear);
    const float gate = __fdividef(1.f, 1.f + ptx::exp2_approx(-kLog2E * u2));
    slope = fmaf(x * fmaf(x * x, 3.f * kCubic, kLinear) * gate, 1.f - gate, gate);
    return x * gate;
  }
};
struct ReLU {
  __device__ float operator()(float x, float& slope) const {
    slope = x <= 0.f ? 0.f : 1.f;
    return relu(x);
  }
};
struct ReLUSquared {
  __device__ float operator()(float x, float& slope) const {
    const float positive = relu(x);
    slope = 2.f * positive;
    return positive * positive;
  }
};
struct Identity {
  __device__ float operator()(float x, float& slope) const {
    slope = 1.f;
    return x;
  }
};

template <class Function>
struct Plain {
  Function f;
  __device__ float operator()(float h, float, float& slope, float&) const { return f(h, slope); }
};

template <class Function>
struct Gated {
  Function f;
  __device__ float operator()(float gate, float up, float& gate_slope, float& up_slope) const {
    up_slope = f(gate, gate_slope);
    gate_slope *= up;
    return up_slope * up;
  }
};

// Two neighbouring columns, with one reciprocal as in SwiGLU::two.
struct SwiGLUSlopes {
  __device__ void two(float2 gate, float2 up, float2& A, float2& gate_slope,
                      float2& up_slope) const {
    const float p = 1.f + ptx::exp2_approx(fminf(-kLog2E * gate.x, 60.f));
    const float q = 1.f + ptx::exp2_approx(fminf(-kLog2E * gate.y, 60.f));
    const float r = ptx::reciprocal_approx(p * q);
    one(gate.x, up.x, r * q, A.x, gate_slope.x, up_slope.x);
    one(gate.y, up.y, r * p, A.y, gate_slope.y, up_slope.y);
  }

 private:
  __device__ static void one(float gate, float up, float sigmoid, float& A, float& gate_slope,
                             float& up_slope) {
    up_slope = gate * sigmoid;
    gate_slope = up * fmaf(up_slope, 1.f - sigmoid, sigmoid);
    A = up * up_slope;
  }
};

// Nothing flows back through what was clamped; NaN is not clamped.
struct ClampedSwiGLUSlopes {
  ClampedSwiGLU params;
  __device__ float operator()(float gate, float up, float& gate_slope, float& up_slope) const {
    const float clamp = params.clamp;
    const bool gate_clamped = gate > clamp, up_clamped = fabsf(up) > clamp;
    const float A = Gated<SiLU>{{params.alpha}}(
        gate_clamped ? clamp : gate, (up_clamped ? copysignf(clamp, up) : up) + params.up_shift,
        gate_slope, up_slope);
    if (gate_clamped) gate_slope = 0.f;
    if (up_clamped) up_slope = 0.f;
    return A;
  }
};

}  // namespace activation

// Calls body(f); one branch outside the loop over elements.
template <Activations kSet, class Body>
__device__ __forceinline__ void with_activation_slopes(const ActivationParams& params,
                                                       const Body& body) {
  using namespace activation;
  if constexpr (kSet == Activations::kSwiGLU) {
    body(SwiGLUSlopes());
  } else if constexpr (kSet == Activations::kGated) {
    switch (params.kind) {
      case TILEMOE_SWIGLU:
        body(ClampedSwiGLUSlopes{{params.clamp, params.alpha, params.up_shift}});
        break;
      case TILEMOE_GEGLU: body(Gated<GELU>()); break;
      case TILEMOE_GEGLU_TANH: body(Gated<GELUTanh>()); break;
      default: body(Gated<ReLU>()); break;
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
