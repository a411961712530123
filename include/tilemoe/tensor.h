// Views of memory that the caller owns.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "tilemoe/error.h"

namespace tilemoe {

enum class DType : int {
  kFloat32 = TILEMOE_FLOAT32,
  kBFloat16 = TILEMOE_BFLOAT16,
  kFloat16 = TILEMOE_FLOAT16,
  kInt32 = TILEMOE_INT32,
  kInt64 = TILEMOE_INT64,
};

enum class Device : int { kCpu = TILEMOE_CPU, kCuda = TILEMOE_CUDA };

inline tilemoe_dtype to_c(DType dtype) {
  return static_cast<tilemoe_dtype>(dtype);
}
inline tilemoe_device to_c(Device device) {
  return static_cast<tilemoe_device>(device);
}
// Bytes of one element.
inline size_t size_of(DType dtype) {
  return tilemoe_dtype_size(to_c(dtype));
}

// A member that must be given: an aggregate without it does not compile.
template <class Value>
struct Required {
  constexpr Required(Value given) : value(given) {}
  constexpr operator Value() const { return value; }
  Value value;
};

// A view of 1 to 3 dimensions; strides count elements. A default-constructed one is absent. Inputs
// are ConstTensors, which every Tensor is; outputs are Tensors, which const memory makes none of.
struct ConstTensor : tilemoe_tensor {
  ConstTensor() : tilemoe_tensor{} {}
  ConstTensor(const tilemoe_tensor& view) : tilemoe_tensor(view) {}

  // Contiguous, the last dimension fastest. Throws Error for more than 3 dimensions.
  ConstTensor(const void* pointer, DType type, std::initializer_list<int64_t> dims)
      : tilemoe_tensor{} {
    assign(pointer, type, dims);
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      stride[i] = step;
      step *= shape[i];
    }
  }

  ConstTensor(const void* pointer, DType type, std::initializer_list<int64_t> dims,
              std::initializer_list<int64_t> strides)
      : tilemoe_tensor{} {
    assign(pointer, type, dims);
    if (strides.size() != dims.size())
      throw Error(Status::kInvalidArgument, "Tensor: as many strides as dimensions are needed");
    int i = 0;
    for (int64_t step : strides) stride[i++] = step;
  }

  // The same memory with its last two dimensions exchanged: how a checkpoint's (E, d, 2n) becomes
  // the (E, 2n, d) that tilemoe requires.
  ConstTensor transposed() const {
    ConstTensor view = *this;
    view.exchange_last_two();
    return view;
  }

  bool present() const { return ndim != 0; }

 protected:
  void exchange_last_two() {
    if (ndim < 2) throw Error(Status::kInvalidArgument, "Tensor::transposed needs two dimensions");
    const int a = ndim - 2, b = ndim - 1;
    const int64_t size = shape[a], step = stride[a];
    shape[a] = shape[b], stride[a] = stride[b];
    shape[b] = size, stride[b] = step;
  }

 private:
  // The C struct has one kind of pointer; the library writes to outputs alone.
  void assign(const void* pointer, DType type, std::initializer_list<int64_t> dims) {
    if (dims.size() > TILEMOE_MAX_DIMS)
      throw Error(Status::kInvalidArgument, "Tensor: at most 3 dimensions");
    data = const_cast<void*>(pointer);
    dtype = to_c(type);
    for (int64_t size : dims) shape[ndim++] = size;
  }
};

struct Tensor : ConstTensor {
  Tensor() = default;
  Tensor(const tilemoe_tensor& view) : ConstTensor(view) {}
  Tensor(const ConstTensor&) = delete;
  Tensor(void* pointer, DType type, std::initializer_list<int64_t> dims)
      : ConstTensor(pointer, type, dims) {}
  Tensor(void* pointer, DType type, std::initializer_list<int64_t> dims,
         std::initializer_list<int64_t> strides)
      : ConstTensor(pointer, type, dims, strides) {}

  Tensor transposed() const {
    Tensor view = *this;
    view.exchange_last_two();
    return view;
  }
};

}  // namespace tilemoe
