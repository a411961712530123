// The activations on float32 vectors, and the activation of a layer. For inclusion in a file that
// Highway compiles once for every target.
//
// Each has value(d, x) and value_and_slope(d, x, slope). They keep their relative accuracy in the
// negative tail, down to where the result leaves float32's range, and pass NaN on.
#if defined(TILEMOE_CPU_ACTIVATION_FUNCTIONS_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEMOE_CPU_ACTIVATION_FUNCTIONS_INL_H_
#undef TILEMOE_CPU_ACTIVATION_FUNCTIONS_INL_H_
#else
#define TILEMOE_CPU_ACTIVATION_FUNCTIONS_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

#include <limits>

#include "tilemoe/tilemoe.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::cpu {
namespace HWY_NAMESPACE {
namespace hn = hwy::HWY_NAMESPACE;

// 1 / (1 + exp(-x)). The exponential of a positive number is never taken, so nothing overflows.
template <class D, class V>
HWY_INLINE V sigmoid(D d, V x) {
  const V one = hn::Set(d, 1.0f);
  const V decay = hn::Exp(d, hn::Neg(hn::Abs(x)));
  const V numerator = hn::IfThenElse(hn::Lt(x, hn::Zero(d)), decay, one);
  return hn::Div(numerator, hn::Add(one, decay));
}

// x sigmoid(alpha x)
struct SiLU {
  float alpha = 1.0f;

  template <class D, class V>
  HWY_INLINE V value(D d, V x) const {
    return hn::Mul(x, sigmoid(d, hn::Mul(x, hn::Set(d, alpha))));
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    const V scaled = hn::Mul(x, hn::Set(d, alpha));
    const V gate = sigmoid(d, scaled);
    const V rest = hn::Sub(hn::Set(d, 1.0f), gate);
    slope = hn::MulAdd(hn::Mul(gate, rest), scaled, gate);
    return hn::Mul(x, gate);
  }
};

// x Phi(x), Phi the normal distribution: GELU's erf form.
struct GELU {
  template <class D, class V>
  HWY_INLINE V value(D d, V x) const {
    V bell;
    return hn::Mul(x, distribution(d, x, bell));
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    V bell;
    const V phi = distribution(d, x, bell);
    const V density = hn::Mul(bell, hn::Set(d, 0.398942280f));  // 1 / sqrt(2 pi)
    slope = hn::MulAdd(x, density, phi);
    return hn::Mul(x, phi);
  }

 private:
  // Phi(-t) exp(t^2 / 2) for t in [0, 14.5] as y P(y), y = 1 / (1 + 0.35 t): the polynomial of
  // least greatest relative error, 3.2e-8, by Lawson's iteration; 3.2e-7 when evaluated in float32.
  // Beyond 14.5 the result is not a float32 any more. `bell` is exp(-x^2 / 2).
  template <class D, class V>
  HWY_INLINE V distribution(D d, V x, V& bell) const {
    const V one = hn::Set(d, 1.0f);
    const V y = hn::Div(one, hn::MulAdd(hn::Abs(x), hn::Set(d, 0.35f), one));
    V p = hn::Set(d, -0.0291580297f);
    p = hn::MulAdd(p, y, hn::Set(d, 0.144031614f));
    p = hn::MulAdd(p, y, hn::Set(d, -0.255840391f));
    p = hn::MulAdd(p, y, hn::Set(d, 0.159321249f));
    p = hn::MulAdd(p, y, hn::Set(d, -0.0232133921f));
    p = hn::MulAdd(p, y, hn::Set(d, 0.105552927f));
    p = hn::MulAdd(p, y, hn::Set(d, 0.119821183f));
    p = hn::MulAdd(p, y, hn::Set(d, 0.139863536f));
    p = hn::MulAdd(p, y, hn::Set(d, 0.139621302f));
    p = hn::MulAdd(p, y, hn::Zero(d));
    bell = hn::Exp(d, hn::Mul(hn::Mul(x, x), hn::Set(d, -0.5f)));
    const V tail = hn::Mul(bell, p);
    return hn::IfThenElse(hn::Lt(x, hn::Zero(d)), tail, hn::Sub(one, tail));
  }
};

// x (1 + tanh u) / 2 = x sigmoid(2 u), u = sqrt(2 / pi) (x + 0.044715 x^3): GELU's tanh form.
struct GELUTanh {
  template <class D, class V>
  HWY_INLINE V value(D d, V x) const {
    return hn::Mul(x, sigmoid(d, argument(d, x)));
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    const V gate = sigmoid(d, argument(d, x));
    const V rest = hn::Sub(hn::Set(d, 1.0f), gate);
    const V inner = hn::MulAdd(hn::Mul(x, x), hn::Set(d, 3.0f * kCubic), hn::Set(d, kLinear));
    slope = hn::MulAdd(hn::Mul(hn::Mul(x, inner), gate), rest, gate);
    return hn::Mul(x, gate);
  }

 private:
  static constexpr float kLinear = 1.59576912f;  // 2 sqrt(2 / pi)
  static constexpr float kCubic = kLinear * 0.044715f;

  template <class D, class V>
  HWY_INLINE V argument(D d, V x) const {
    return hn::Mul(x, hn::MulAdd(hn::Mul(x, x), hn::Set(d, kCubic), hn::Set(d, kLinear)));
  }
};

// Highway's exponential of NaN is a number; elsewhere the factor x passes NaN on.
struct Sigmoid {
  template <class D, class V>
  HWY_INLINE V value(D d, V x) const {
    return hn::IfThenElse(hn::IsNaN(x), x, sigmoid(d, x));
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    const V result = value(d, x);
    slope = hn::Mul(result, sigmoid(d, hn::Neg(x)));  // 1 - result would lose the digits of large x
    return result;
  }
};

struct ReLU {
  template <class D, class V>
  HWY_INLINE V value(D d, V x) const {
    return hn::IfThenElse(hn::Le(x, hn::Zero(d)), hn::Zero(d), x);
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    slope = hn::IfThenElse(hn::Le(x, hn::Zero(d)), hn::Zero(d), hn::Set(d, 1.0f));
    return value(d, x);
  }
};

struct ReLUSquared {
  template <class D, class V>
  HWY_INLINE V value(D d, V x) const {
    const V positive = ReLU().value(d, x);
    return hn::Mul(positive, positive);
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    const V positive = ReLU().value(d, x);
    slope = hn::Add(positive, positive);
    return hn::Mul(positive, positive);
  }
};

struct Identity {
  template <class D, class V>
  HWY_INLINE V value(D, V x) const {
    return x;
  }
  template <class D, class V>
  HWY_INLINE V value_and_slope(D d, V x, V& slope) const {
    slope = hn::Set(d, 1.0f);
    return x;
  }
};

// ------------------------------------------------------------- of one or two columns of H

// A = f(H)
template <class Function>
struct Plain {
  Function f;

  template <class D, class V>
  HWY_INLINE V value(D d, V gate, V) const {
    return f.value(d, gate);
  }
  template <class D, class V>
  HWY_INLINE V value_and_slopes(D d, V gate, V, V& gate_slope, V&) const {
    return f.value_and_slope(d, gate, gate_slope);
  }
};

// A = f(gate) up
template <class Function>
struct Gated {
  Function f;

  template <class D, class V>
  HWY_INLINE V value(D d, V gate, V up) const {
    return hn::Mul(f.value(d, gate), up);
  }
  template <class D, class V>
  HWY_INLINE V value_and_slopes(D d, V gate, V up, V& gate_slope, V& up_slope) const {
    V slope;
    up_slope = f.value_and_slope(d, gate, slope);
    gate_slope = hn::Mul(slope, up);
    return hn::Mul(up_slope, up);
  }
};

// gpt-oss: A = f(min(gate, limit)) (clip(up, -limit, limit) + shift). Nothing flows back through
// what was clamped; NaN is not clamped.
struct ClampedSwiGLU {
  SiLU f;
  float limit;
  float shift;

  template <class D, class V>
  HWY_INLINE V value(D d, V gate, V up) const {
    return Gated<SiLU>{f}.value(d, clamp_gate(d, gate), clamp_up(d, up));
  }
  template <class D, class V>
  HWY_INLINE V value_and_slopes(D d, V gate, V up, V& gate_slope, V& up_slope) const {
    const V limits = hn::Set(d, limit);
    const V A = Gated<SiLU>{f}.value_and_slopes(d, clamp_gate(d, gate), clamp_up(d, up), gate_slope,
                                                up_slope);
    gate_slope = hn::IfThenElse(hn::Gt(gate, limits), hn::Zero(d), gate_slope);
    up_slope = hn::IfThenElse(hn::Gt(hn::Abs(up), limits), hn::Zero(d), up_slope);
    return A;
  }

 private:
  template <class D, class V>
  HWY_INLINE V clamp_gate(D d, V gate) const {
    const V limits = hn::Set(d, limit);
    return hn::IfThenElse(hn::Gt(gate, limits), limits, gate);
  }
  template <class D, class V>
  HWY_INLINE V clamp_up(D d, V up) const {
    const V limits = hn::Set(d, limit);
    const V clipped = hn::IfThenElse(hn::Gt(hn::Abs(up), limits), hn::CopySign(limits, up), up);
    return hn::Add(clipped, hn::Set(d, shift));
  }
};

// Kimi K3's SiTU-GLU: A = 4 tanh(gate / 4) sigmoid(gate) 25 tanh(up / 25)
struct SiTUGLU {
  template <class D, class V>
  HWY_INLINE V value(D d, V gate, V up) const {
    return hn::Mul(hn::Mul(softcap(d, gate, kGateCap), sigmoid(d, gate)), softcap(d, up, kUpCap));
  }
  template <class D, class V>
  HWY_INLINE V value_and_slopes(D d, V gate, V up, V& gate_slope, V& up_slope) const {
    const V capped = softcap(d, gate, kGateCap), capped_up = softcap(d, up, kUpCap);
    const V s = sigmoid(d, gate), rest = sigmoid(d, hn::Neg(gate));  // 1 - s
    const V f = hn::Mul(capped, s);
    const V slope = hn::Mul(hn::MulAdd(capped, rest, softcap_slope(d, gate, kGateCap)), s);
    gate_slope = hn::Mul(slope, capped_up);
    up_slope = hn::Mul(f, softcap_slope(d, up, kUpCap));
    return hn::Mul(f, capped_up);
  }

 private:
  static constexpr float kGateCap = 4.0f, kUpCap = 25.0f;

  // cap tanh(x / cap). Highway's tanh of NaN is a number.
  template <class D, class V>
  HWY_INLINE V softcap(D d, V x, float cap) const {
    const V tanh = hn::Tanh(d, hn::Mul(x, hn::Set(d, 1.0f / cap)));
    return hn::IfThenElse(hn::IsNaN(x), x, hn::Mul(tanh, hn::Set(d, cap)));
  }
  // 1 - tanh(x / cap)^2 = 4 sigmoid(y) sigmoid(-y), y = 2 x / cap
  template <class D, class V>
  HWY_INLINE V softcap_slope(D d, V x, float cap) const {
    const V y = hn::Mul(x, hn::Set(d, 2.0f / cap));
    return hn::Mul(hn::Mul(sigmoid(d, y), sigmoid(d, hn::Neg(y))), hn::Set(d, 4.0f));
  }
};

// ------------------------------------------------------------- the activation of a layer

// Plain SwiGLU, or gpt-oss's form of it.
template <class Body>
HWY_INLINE void with_swiglu(const tilemoe_experts& experts, Body&& body) {
  if (experts.clamp == 0 && experts.alpha == 0 && experts.up_shift == 0) return body(Gated<SiLU>());
  body(ClampedSwiGLU{
      .f = {.alpha = experts.alpha != 0 ? experts.alpha : 1.0f},
      .limit = experts.clamp != 0 ? experts.clamp : std::numeric_limits<float>::infinity(),
      .shift = experts.up_shift});
}

// Calls body with the activation of these experts.
template <class Body>
HWY_INLINE void with_activation(const tilemoe_experts& experts, Body&& body) {
  switch (experts.activation) {
    case TILEMOE_SWIGLU: return with_swiglu(experts, body);
    case TILEMOE_GEGLU: return body(Gated<GELU>());
    case TILEMOE_GEGLU_TANH: return body(Gated<GELUTanh>());
    case TILEMOE_REGLU: return body(Gated<ReLU>());
    case TILEMOE_SILU: return body(Plain<SiLU>());
    case TILEMOE_GELU: return body(Plain<GELU>());
    case TILEMOE_GELU_TANH: return body(Plain<GELUTanh>());
    case TILEMOE_RELU: return body(Plain<ReLU>());
    case TILEMOE_RELU_SQUARED: return body(Plain<ReLUSquared>());
    case TILEMOE_IDENTITY: return body(Plain<Identity>());
    case TILEMOE_GLU: return body(Gated<Sigmoid>());
    case TILEMOE_SITU_GLU: return body(SiTUGLU());
  }
}

}  // namespace HWY_NAMESPACE
}  // namespace tilemoe::cpu
HWY_AFTER_NAMESPACE();

#endif  // per-target include guard
