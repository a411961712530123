#include "cpu/elementwise.h"

#include <cstring>

#include "core/dtype.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "cpu/elementwise.cpp"
#include <hwy/foreach_target.h>  // compiles what is inside HWY_NAMESPACE once for every target
#include <hwy/highway.h>

#include "cpu/vectors-inl.h"

HWY_BEFORE_NAMESPACE();
namespace tilemoe::cpu {
namespace HWY_NAMESPACE {
namespace {

// Calls body with a value of the C++ type that `dtype` names: with_float, for the vectors of a
// target.
template <class Body>
HWY_INLINE void with_type(tilemoe_dtype dtype, Body&& body) {
  switch (dtype) {
    case TILEMOE_FLOAT32: return body(float{});
    case TILEMOE_BFLOAT16: return body(BFloat16{});
    case TILEMOE_FLOAT16: return body(Float16{});
    default: refuse_dtype<float, BFloat16, Float16>(dtype);
  }
}

const char* vector_target() {
  return hwy::TargetName(HWY_TARGET);
}

void to_float(const void* from, tilemoe_dtype dtype, int64_t step, float* to, int64_t count) {
  with_type(dtype, [&](auto type) HWY_ATTR {
    using Element = decltype(type);
    const auto* source = static_cast<const Element*>(from);
    if (step == 1) {
      for_each_vector(
          count, [&](auto d, int64_t i) HWY_ATTR { hn::StoreU(load(d, source + i), d, to + i); });
    } else {
      // A vector's load also covers the element after its last; past the row another task may own
      // it.
      const int64_t last = count - 8;
      for_each_vector(last, [&](auto d, int64_t i)
                                HWY_ATTR { hn::StoreU(load_even(d, source + 2 * i), d, to + i); });
      for (int64_t i = last; i < count; ++i) to[i] = tilemoe::to_float(source[2 * i]);
    }
  });
}

void from_float(const float* from, void* to, tilemoe_dtype dtype, int64_t step, int64_t count,
                bool add) {
  with_type(dtype, [&](auto type) HWY_ATTR {
    using Element = decltype(type);
    auto* out = static_cast<Element*>(to);
    if (step != 1) {  // another task may own the elements in between
      for (int64_t i = 0; i < count; ++i) {
        const float value = add ? tilemoe::to_float(out[i * step]) + from[i] : from[i];
        tilemoe::store(value, out[i * step]);
      }
    } else if (add) {
      for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
        store(d, hn::Add(load(d, out + i), hn::LoadU(d, from + i)), out + i);
      });
    } else {
      for_each_vector(
          count, [&](auto d, int64_t i) HWY_ATTR { store(d, hn::LoadU(d, from + i), out + i); });
    }
  });
}

void add_scaled(const void* from, tilemoe_dtype dtype, float scale, float* sum, int64_t count) {
  with_type(dtype, [&](auto type) HWY_ATTR {
    const auto* source = static_cast<const decltype(type)*>(from);
    for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
      const auto total = hn::MulAdd(hn::Set(d, scale), load(d, source + i), hn::LoadU(d, sum + i));
      hn::StoreU(total, d, sum + i);
    });
  });
}

float dot(const void* a, const void* b, tilemoe_dtype dtype, int64_t count) {
  float total = 0;
  with_type(dtype, [&](auto type) HWY_ATTR {
    const auto* left = static_cast<const decltype(type)*>(a);
    const auto* right = static_cast<const decltype(type)*>(b);
    total = sum_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
      return hn::Mul(load(d, left + i), load(d, right + i));
    });
  });
  return total;
}

void sum_rows(const RowSum& sum, int64_t count) {
  with_type(sum.dtype, [&](auto type) HWY_ATTR {
    using Element = decltype(type);
    const auto* addend = static_cast<const Element*>(sum.addend);
    const auto* rows = static_cast<const Element*>(sum.rows);
    auto* out = static_cast<Element*>(sum.out);
    for_each_vector(count, [&](auto d, int64_t i) HWY_ATTR {
      auto total = addend ? load(d, addend + i) : hn::Zero(d);
      for (int64_t term = 0; term < sum.terms; ++term) {
        const int64_t row = sum.row[term];
        if (row < 0) continue;
        const auto value = load(d, rows + row * sum.row_stride + i);
        total = sum.scale ? hn::MulAdd(hn::Set(d, sum.scale[row]), value, total)
                          : hn::Add(value, total);
      }
      store(d, total, out + i);
    });
  });
}

}  // namespace
}  // namespace HWY_NAMESPACE
}  // namespace tilemoe::cpu
HWY_AFTER_NAMESPACE();

#if HWY_ONCE
namespace tilemoe::cpu {

HWY_EXPORT(vector_target);
HWY_EXPORT(to_float);
HWY_EXPORT(from_float);
HWY_EXPORT(add_scaled);
HWY_EXPORT(dot);
HWY_EXPORT(sum_rows);

const char* vector_target() {
  return HWY_DYNAMIC_DISPATCH(vector_target)();
}
void to_float(const void* from, tilemoe_dtype dtype, int64_t step, float* to, int64_t count) {
  if (dtype == TILEMOE_FLOAT32 && step == 1)
    std::memcpy(to, from, static_cast<size_t>(count) * sizeof(float));
  else
    HWY_DYNAMIC_DISPATCH(to_float)(from, dtype, step, to, count);
}
void from_float(const float* from, void* to, tilemoe_dtype dtype, int64_t step, int64_t count,
                bool add) {
  HWY_DYNAMIC_DISPATCH(from_float)(from, to, dtype, step, count, add);
}
void add_scaled(const void* from, tilemoe_dtype dtype, float scale, float* sum, int64_t count) {
  HWY_DYNAMIC_DISPATCH(add_scaled)(from, dtype, scale, sum, count);
}
float dot(const void* a, const void* b, tilemoe_dtype dtype, int64_t count) {
  return HWY_DYNAMIC_DISPATCH(dot)(a, b, dtype, count);
}
void sum_rows(const RowSum& sum, int64_t count) {
  HWY_DYNAMIC_DISPATCH(sum_rows)(sum, count);
}

}  // namespace tilemoe::cpu
#endif  // HWY_ONCE
