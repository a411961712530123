#include "cpu/activation.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/activation.cpp"
#include <hwy/foreach_target.h>  // compiles what is inside HWY_NAMESPACE once for every target
#include <hwy/highway.h>

#include "cpu/activations-inl.h"
#include "cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::cpu {
namespace HWY_NAMESPACE {
namespace {

void activate(const tilemoe_experts& experts, const float* gate, const float* up, float* A,
              int64_t count) {
  with_activation(experts, [&](auto activation) HWY_ATTR {
    for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
      const auto g = hn::LoadU(d, gate + i);
      const auto u = up ? hn::LoadU(d, up + i) : hn::Zero(d);
      hn::StoreU(activation.value(d, g, u), d, A + i);
    });
  });
}

float activate_gradient(const tilemoe_experts& experts, const ActivationGradientRow& row,
                        int64_t count) {
  float ds = 0;
  with_activation(experts, [&](auto activation) HWY_ATTR {
    ds = sum_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
      const auto g = hn::LoadU(d, row.gate + i);
      const auto u = row.up ? hn::LoadU(d, row.up + i) : hn::Zero(d);
      const auto dA = hn::LoadU(d, row.dA + i);
      const auto s = hn::Set(d, row.score);
      auto gate_slope = hn::Zero(d);
      auto up_slope = hn::Zero(d);
      const auto A = activation.value_and_slopes(d, g, u, gate_slope, up_slope);
      const auto scaled = hn::Mul(s, dA);
      if (row.d_gate) hn::StoreU(hn::Mul(gate_slope, scaled), d, row.d_gate + i);
      if (row.d_up) hn::StoreU(hn::Mul(up_slope, scaled), d, row.d_up + i);
      if (row.A_scaled) hn::StoreU(hn::Mul(s, A), d, row.A_scaled + i);
      return hn::Mul(dA, A);
    });
  });
  return ds;
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tilemoe::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tilemoe::cpu {

HWY_EXPORT(activate);
HWY_EXPORT(activate_gradient);

void activate(const tilemoe_experts& experts, const float* gate, const float* up, float* A,
              int64_t count) {
  HWY_DYNAMIC_DISPATCH(activate)(experts, gate, up, A, count);
}
float activate_gradient(const tilemoe_experts& experts, const ActivationGradientRow& row,
                        int64_t count) {
  return HWY_DYNAMIC_DISPATCH(activate_gradient)(experts, row, count);
}

}  // namespace tilemoe::cpu
#endif  // HWY_ONCE
