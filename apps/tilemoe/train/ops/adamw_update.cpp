#include "train/ops/adamw_update.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/ops/adamw_update.cpp"
#include <hwy/foreach_target.h>

#include "train/ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::train::HWY_NAMESPACE {
namespace {

void update_stretch(const AdamWStretch& stretch, const AdamWFactors& factors) {
  const FloatVector gradient_scale = broadcast(factors.gradient_scale);
  const FloatVector beta1 = broadcast(factors.beta1), rest1 = broadcast(1 - factors.beta1);
  const FloatVector beta2 = broadcast(factors.beta2), rest2 = broadcast(1 - factors.beta2);
  const FloatVector square_scale = broadcast(factors.square_scale);
  const FloatVector epsilon = broadcast(factors.epsilon);
  const FloatVector step_size = broadcast(factors.step_size), kept = broadcast(factors.kept);
  for (int64_t i = 0; i < stretch.size; i += lanes()) {
    const FloatVector g = hn::Mul(load(stretch.gradient + i), gradient_scale);
    const FloatVector mean = hn::MulAdd(beta1, load(stretch.mean + i), hn::Mul(rest1, g));
    const FloatVector square =
        hn::MulAdd(beta2, load(stretch.square + i), hn::Mul(rest2, hn::Mul(g, g)));
    store(mean, stretch.mean + i);
    store(square, stretch.square + i);
    const FloatVector deviation = hn::Add(hn::Sqrt(hn::Mul(square, square_scale)), epsilon);
    const FloatVector change = hn::Div(hn::Mul(step_size, mean), deviation);
    store(hn::MulSub(kept, load(stretch.value + i), change), stretch.value + i);
  }
}

double squares(const float* values, int64_t size) {
  constexpr int64_t kRun = 512;
  double sum = 0;
  for (int64_t first = 0; first < size; first += kRun)
    sum += dot(values + first, values + first, std::min(kRun, size - first));
  return sum;
}

}  // namespace
}  // namespace tilemoe::train::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tilemoe::train {

HWY_EXPORT(update_stretch);
HWY_EXPORT(squares);

void adamw_update(const AdamWStretch& stretch, const AdamWFactors& factors) {
  HWY_DYNAMIC_DISPATCH(update_stretch)(stretch, factors);
}

double sum_of_squares(const float* values, int64_t size) {
  return HWY_DYNAMIC_DISPATCH(squares)(values, size);
}

}  // namespace tilemoe::train
#endif
