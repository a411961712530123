// Arrays of routing, whose type is known when they are read: a switch that all threads take alike
// costs nothing compared with the memory, and one kernel replaces one for every two types.
#pragma once

#include <cstdint>

#include "core/dtype.h"
#include "core/numbers.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {

struct FloatArray {
  const void* data;
  tilemoe_dtype dtype;

  __device__ __forceinline__ float at(int64_t i) const {
    switch (dtype) {
      case TILEMOE_BFLOAT16: return to_float(static_cast<const BFloat16*>(data)[i]);
      case TILEMOE_FLOAT16: return to_float(static_cast<const Float16*>(data)[i]);
      default: return static_cast<const float*>(data)[i];
    }
  }
  // Elements first, first + step, ... before `end`, 0 past it: all loads are in flight together.
  template <int kCount>
  __device__ __forceinline__ void load(int64_t first, int64_t step, int64_t end,
                                       float (&out)[kCount]) const {
    switch (dtype) {
      case TILEMOE_BFLOAT16: return load(static_cast<const BFloat16*>(data), first, step, end, out);
      case TILEMOE_FLOAT16: return load(static_cast<const Float16*>(data), first, step, end, out);
      default: return load(static_cast<const float*>(data), first, step, end, out);
    }
  }

 private:
  template <class Element, int kCount>
  __device__ __forceinline__ static void load(const Element* from, int64_t first, int64_t step,
                                              int64_t end, float (&out)[kCount]) {
#pragma unroll
    for (int i = 0; i < kCount; ++i) {
      const int64_t place = first + i * step;
      out[i] = place < end ? to_float(from[place]) : 0.f;
    }
  }
};

struct IntegerArray {
  void* data;
  bool wide;  // int64, else int32

  __device__ __forceinline__ int64_t at(int64_t i) const {
    return wide ? static_cast<const int64_t*>(data)[i] : static_cast<const int32_t*>(data)[i];
  }
  __device__ __forceinline__ void set(int64_t i, int32_t value) const {
    if (wide)
      static_cast<int64_t*>(data)[i] = value;
    else
      static_cast<int32_t*>(data)[i] = value;
  }
  __device__ __forceinline__ IntegerArray from(int64_t i) const {
    return {static_cast<char*>(data) + i * (wide ? 8 : 4), wide};
  }
};

// Row t of logits (T, E).
struct LogitRows {
  const void* data;
  tilemoe_dtype dtype;
  int64_t row_bytes;

  __device__ __forceinline__ FloatArray row(int64_t t) const {
    return {static_cast<const char*>(data) + t * row_bytes, dtype};
  }
};

// Kernels know the types that these let through, and no other.
inline FloatArray float_array(const tilemoe_tensor& tensor) {
  with_float(tensor.dtype, [&]<class Element>() {});
  return {tensor.data, tensor.dtype};
}
inline IntegerArray integer_array(const tilemoe_tensor& tensor) {
  const bool wide = with_integer(
      tensor.dtype, [&]<class Integer>() { return sizeof(Integer) == sizeof(int64_t); });
  return {tensor.data, wide};
}
inline LogitRows logit_rows(const tilemoe_tensor& logits) {
  const FloatArray array = float_array(logits);
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(array.dtype));
  return {array.data, array.dtype, logits.stride[0] * element};
}

}  // namespace tilemoe::cuda
