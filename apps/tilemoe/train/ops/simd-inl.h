// The vectors of the trainer's elementwise loops, once for each instruction set (Highway's dynamic
// dispatch). At most 16 lanes, so a row whose width is a multiple of kRowMultiple has no tail.
#include <cstdint>

#include "train/ops/tasks.h"

// Highway compiles this file once a target: the guard flips each time.
#if defined(TILEMOE_TRAIN_OPS_SIMD_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef TILEMOE_TRAIN_OPS_SIMD_INL_H_
#undef TILEMOE_TRAIN_OPS_SIMD_INL_H_
#else
#define TILEMOE_TRAIN_OPS_SIMD_INL_H_
#endif

#include <hwy/contrib/math/math-inl.h>
#include <hwy/highway.h>

HWY_BEFORE_NAMESPACE();
namespace tilemoe::train::HWY_NAMESPACE {

namespace hn = hwy::HWY_NAMESPACE;
using FloatTag = hn::CappedTag<float, kRowMultiple>;
using FloatVector = hn::Vec<FloatTag>;

inline int64_t lanes() {
  return static_cast<int64_t>(hn::Lanes(FloatTag()));
}
inline FloatVector load(const float* from) {
  return hn::LoadU(FloatTag(), from);
}
inline void store(FloatVector value, float* to) {
  hn::StoreU(value, FloatTag(), to);
}
inline FloatVector broadcast(float value) {
  return hn::Set(FloatTag(), value);
}
inline FloatVector zero() {
  return hn::Zero(FloatTag());
}
inline FloatVector exponential(FloatVector value) {
  return hn::Exp(FloatTag(), value);
}
inline float sum_lanes(FloatVector value) {
  return hn::GetLane(hn::SumOfLanes(FloatTag(), value));
}
inline float max_lanes(FloatVector value) {
  return hn::GetLane(hn::MaxOfLanes(FloatTag(), value));
}

// <a, b> over `count` elements, a multiple of kRowMultiple.
inline float dot(const float* a, const float* b, int64_t count) {
  FloatVector sum = zero();
  for (int64_t i = 0; i < count; i += lanes()) sum = hn::MulAdd(load(a + i), load(b + i), sum);
  return sum_lanes(sum);
}

// to += factor * from
inline void add_scaled(float factor, const float* from, float* to, int64_t count) {
  const FloatVector f = broadcast(factor);
  for (int64_t i = 0; i < count; i += lanes())
    store(hn::MulAdd(f, load(from + i), load(to + i)), to + i);
}

}  // namespace tilemoe::train::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif
