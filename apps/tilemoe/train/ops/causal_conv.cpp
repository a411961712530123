#include "train/ops/cpu_operators.h"
#include "train/ops/partial_sums.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "train/ops/causal_conv.cpp"
#include <hwy/foreach_target.h>

#include "train/ops/simd-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::train::HWY_NAMESPACE {
namespace {

// One token: `past` tokens of its sequence stand before it.
void filter_token(const float* x, const float* filter, int64_t taps, int64_t past,
                  const float* addend, float* y, int64_t width) {
  const int64_t reach = std::min(taps, past + 1);
  for (int64_t c = 0; c < width; c += lanes()) {
    FloatVector sum = load(addend + c);
    for (int64_t j = 0; j < reach; ++j)
      sum = hn::MulAdd(load(filter + j * width + c), load(x - j * width + c), sum);
    store(sum, y + c);
  }
}

// dx(t) += sum over j of w_j dy(t + j), dw_j += dy(t + j) x(t); `ahead` tokens stand after it.
void filter_token_backward(const float* x, const float* filter, int64_t taps, int64_t ahead,
                           const float* dy, float* dx, float* dfilter, int64_t width) {
  const int64_t reach = std::min(taps, ahead + 1);
  for (int64_t c = 0; c < width; c += lanes()) {
    const FloatVector x_c = load(x + c);
    FloatVector sum = load(dx + c);
    for (int64_t j = 0; j < reach; ++j) {
      const FloatVector dy_c = load(dy + j * width + c);
      sum = hn::MulAdd(load(filter + j * width + c), dy_c, sum);
      float* const tap = dfilter + j * width + c;
      store(hn::MulAdd(dy_c, x_c, load(tap)), tap);
    }
    store(sum, dx + c);
  }
}

}  // namespace
}  // namespace tilemoe::train::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tilemoe::train {

HWY_EXPORT(filter_token);
HWY_EXPORT(filter_token_backward);

void CpuOperators::causal_conv(Sequences sequences, ConstFloats x, ConstFloats filter, int64_t taps,
                               ConstFloats addend, Floats y) {
  const int64_t width = std::ssize(filter) / taps;
  for_row_blocks(sequences.tokens(), [&](int64_t first, int64_t last, int64_t) {
    const auto forward = HWY_DYNAMIC_DISPATCH(filter_token);
    for (int64_t t = first; t < last; ++t)
      forward(x.data() + t * width, filter.data(), taps, t % sequences.length,
              addend.data() + t * width, y.data() + t * width, width);
  });
}

int64_t causal_conv_scratch(Sequences sequences, int64_t taps, int64_t width) {
  return row_tasks(sequences.tokens()) * taps * width;
}

void CpuOperators::causal_conv_backward(Sequences sequences, ConstFloats x, ConstFloats filter,
                                        int64_t taps, ConstFloats dy, Floats dx, Floats dfilter,
                                        Floats scratch) {
  const int64_t width = std::ssize(filter) / taps;
  for_row_blocks(sequences.tokens(), [&](int64_t first, int64_t last, int64_t task) {
    const auto backward = HWY_DYNAMIC_DISPATCH(filter_token_backward);
    float* const partial = scratch.data() + task * taps * width;
    std::fill_n(partial, taps * width, 0.f);
    for (int64_t t = first; t < last; ++t)
      backward(x.data() + t * width, filter.data(), taps,
               sequences.length - 1 - t % sequences.length, dy.data() + t * width,
               dx.data() + t * width, partial, width);
  });
  sum_partials(scratch, row_tasks(sequences.tokens()), dfilter);
}

}  // namespace tilemoe::train
#endif
