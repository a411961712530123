#include <cmath>

#include "train/ops/cpu_operators.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/ops/cross_entropy.cpp"
#include <hwy/foreach_target.h>

#include "train/ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::train::HWY_NAMESPACE {
namespace {

// log(sum(exp(logits))) - logits[target]. `gradient` may be null, or lie over the logits.
float row_loss(const float* logits, uint8_t target, float scale, float* gradient) {
  FloatVector highest = load(logits);
  for (int64_t v = lanes(); v < kByteValues; v += lanes())
    highest = hn::Max(highest, load(logits + v));
  const float max = max_lanes(highest);
  const FloatVector shift = broadcast(max);
  HWY_ALIGN float exponentials[kByteValues];
  FloatVector sums = zero();
  for (int64_t v = 0; v < kByteValues; v += lanes()) {
    const FloatVector e = exponential(hn::Sub(load(logits + v), shift));
    store(e, exponentials + v);
    sums = hn::Add(sums, e);
  }
  const float sum = sum_lanes(sums);
  const float loss = std::log(sum) + max - logits[target];
  if (gradient != nullptr) {
    const FloatVector factor = broadcast(scale / sum);
    for (int64_t v = 0; v < kByteValues; v += lanes())
      store(hn::Mul(load(exponentials + v), factor), gradient + v);
    gradient[target] -= scale;
  }
  return loss;
}

}  // namespace
}  // namespace tilemoe::train::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tilemoe::train {

HWY_EXPORT(row_loss);

void CpuOperators::cross_entropy(ConstFloats logits, ConstBytes targets, Floats losses) {
  for_row_blocks(std::ssize(targets), [&](int64_t first, int64_t last, int64_t) {
    const auto loss = HWY_DYNAMIC_DISPATCH(row_loss);
    for (auto t = static_cast<size_t>(first); t < static_cast<size_t>(last); ++t)
      losses[t] = loss(logits.data() + t * kByteValues, targets[t], 0.f, nullptr);
  });
}

void CpuOperators::cross_entropy_with_gradient(Floats logits, ConstBytes targets, float scale,
                                               Floats losses) {
  for_row_blocks(std::ssize(targets), [&](int64_t first, int64_t last, int64_t) {
    const auto loss = HWY_DYNAMIC_DISPATCH(row_loss);
    for (auto t = static_cast<size_t>(first); t < static_cast<size_t>(last); ++t) {
      float* const row = logits.data() + t * kByteValues;
      losses[t] = loss(row, targets[t], scale, row);
    }
  });
}

}  // namespace tilemoe::train
#endif
