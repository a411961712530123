#include <cmath>

#include "train/ops/cpu_operators.h"
#include "train/ops/partial_sums.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/ops/rms_norm.cpp"
#include <hwy/foreach_target.h>

#include "train/ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::train::HWY_NAMESPACE {
namespace {

// Returns 1 / rms of the row.
float normalize_row(const float* x, const float* gain, float* y, int64_t width) {
  constexpr float kEpsilon = 1e-6f;
  const float mean_square = dot(x, x, width) / static_cast<float>(width);
  const float inverse_rms = 1.f / std::sqrt(mean_square + kEpsilon);
  const FloatVector scale = broadcast(inverse_rms);
  for (int64_t c = 0; c < width; c += lanes())
    store(hn::Mul(hn::Mul(load(x + c), scale), load(gain + c)), y + c);
  return inverse_rms;
}

// With r = 1 / rms and g = gain * dy: dx += r g - x r^3 mean(g x), dgain += dy x r.
void normalize_row_backward(const float* x, const float* gain, float inverse_rms, const float* dy,
                            float* dx, float* dgain, int64_t width) {
  FloatVector sum = zero();
  for (int64_t c = 0; c < width; c += lanes())
    sum = hn::MulAdd(hn::Mul(load(gain + c), load(dy + c)), load(x + c), sum);
  const float mean = sum_lanes(sum) / static_cast<float>(width);
  const FloatVector r = broadcast(inverse_rms);
  const FloatVector x_factor = broadcast(-mean * inverse_rms * inverse_rms * inverse_rms);
  for (int64_t c = 0; c < width; c += lanes()) {
    const FloatVector x_c = load(x + c), dy_c = load(dy + c);
    const FloatVector g = hn::Mul(load(gain + c), dy_c);
    store(hn::Add(load(dx + c), hn::MulAdd(x_factor, x_c, hn::Mul(r, g))), dx + c);
    store(hn::MulAdd(hn::Mul(dy_c, x_c), r, load(dgain + c)), dgain + c);
  }
}

}  // namespace
}  // namespace tilemoe::train::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tilemoe::train {

HWY_EXPORT(normalize_row);
HWY_EXPORT(normalize_row_backward);

void CpuOperators::rms_norm(ConstFloats x, ConstFloats gain, Floats y, Floats inverse_rms) {
  const auto rows = std::ssize(inverse_rms), width = std::ssize(gain);
  for_row_blocks(rows, [&](int64_t first, int64_t last, int64_t) {
    const auto normalize = HWY_DYNAMIC_DISPATCH(normalize_row);
    for (int64_t t = first; t < last; ++t)
      inverse_rms[static_cast<size_t>(t)] =
          normalize(x.data() + t * width, gain.data(), y.data() + t * width, width);
  });
}

int64_t rms_norm_scratch(int64_t rows, int64_t width) {
  return row_tasks(rows) * width;
}

void CpuOperators::rms_norm_backward(ConstFloats x, ConstFloats gain, ConstFloats inverse_rms,
                                     ConstFloats dy, Floats dx, Floats dgain, Floats scratch) {
  const auto rows = std::ssize(inverse_rms), width = std::ssize(gain);
  for_row_blocks(rows, [&](int64_t first, int64_t last, int64_t task) {
    const auto backward = HWY_DYNAMIC_DISPATCH(normalize_row_backward);
    float* partial = scratch.data() + task * width;
    std::fill_n(partial, width, 0.f);
    for (int64_t t = first; t < last; ++t)
      backward(x.data() + t * width, gain.data(), inverse_rms[static_cast<size_t>(t)],
               dy.data() + t * width, dx.data() + t * width, partial, width);
  });
  sum_partials(scratch, row_tasks(rows), dgain);
}

}  // namespace tilemoe::train
#endif
