#include <numeric>

#include "train/ops/cpu_operators.h"

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

namespace {

// A part of one of several arrays: one task.
struct Stretch {
  size_t array;
  int64_t first;
  int64_t size;
};

// size(array) elements each.
template <class Size>
std::vector<Stretch> stretches(size_t arrays, Size&& size) {
  constexpr int64_t kStretch = 32768;  // four arrays of it fit a core's second cache
  std::vector<Stretch> all;
  for (size_t array = 0; array < arrays; ++array)
    for (int64_t first = 0; first < size(array); first += kStretch)
      all.push_back({array, first, std::min(kStretch, size(array) - first)});
  return all;
}

}  // namespace

double CpuOperators::sum_of_squares(const std::vector<ConstFloats>& arrays) {
  const auto parts =
      stretches(arrays.size(), [&](size_t array) { return std::ssize(arrays[array]); });
  std::vector<double> sums(parts.size());
  parallel_for(std::ssize(parts), [&](int64_t task, int) {
    const Stretch& part = parts[static_cast<size_t>(task)];
    sums[static_cast<size_t>(task)] =
        HWY_DYNAMIC_DISPATCH(squares)(arrays[part.array].data() + part.first, part.size);
  });
  return std::accumulate(sums.begin(), sums.end(), 0.0);
}

void CpuOperators::adamw_update(const std::vector<AdamWTask>& tasks) {
  const auto parts =
      stretches(tasks.size(), [&](size_t array) { return tasks[array].stretch.size; });
  parallel_for(std::ssize(parts), [&](int64_t task, int) {
    const Stretch& part = parts[static_cast<size_t>(task)];
    const AdamWStretch& whole = tasks[part.array].stretch;
    HWY_DYNAMIC_DISPATCH(update_stretch)
    ({.size = part.size,
      .gradient = whole.gradient + part.first,
      .value = whole.value + part.first,
      .mean = whole.mean + part.first,
      .square = whole.square + part.first},
     tasks[part.array].factors);
  });
}

}  // namespace tilemoe::train
#endif
