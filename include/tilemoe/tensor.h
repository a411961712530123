/// @file
/// Views of memory that the caller owns.
#pragma once

#include <cstdint>
#include <initializer_list>

#include "tilemoe/error.h"

namespace tilemoe {

/// Data type of a tensor's elements, see tilemoe_dtype.
enum class DType : int {
  kFloat32 = TILEMOE_FLOAT32,
  kBFloat16 = TILEMOE_BFLOAT16,
  kFloat16 = TILEMOE_FLOAT16,
  kInt32 = TILEMOE_INT32,
  kInt64 = TILEMOE_INT64,
};

/// Backend that runs a call, and the kind of memory of its arrays, see tilemoe_device.
enum class Device : int { kCpu = TILEMOE_CPU, kCuda = TILEMOE_CUDA };

/// Returns the dtype of the C interface.
inline tilemoe_dtype to_c(DType dtype) {
  return static_cast<tilemoe_dtype>(dtype);
}
/// Returns the device of the C interface.
inline tilemoe_device to_c(Device device) {
  return static_cast<tilemoe_device>(device);
}
/// Returns the bytes of one element.
inline size_t size_of(DType dtype) {
  return tilemoe_dtype_size(to_c(dtype));
}

/// A required member of an aggregate: an aggregate without it does not compile.
template <class Value>
struct Required {
  /// Takes the value.
  constexpr Required(Value given) : value(given) {}
  /// Returns the value.
  constexpr operator Value() const { return value; }
  Value value;  ///< the value
};

/// A read-only view of 1 to 3 dimensions; strides count elements. A default-constructed view is
/// absent. Inputs are ConstTensors, and every Tensor is one; outputs are Tensors, which cannot be
/// made from const memory.
struct ConstTensor : tilemoe_tensor {
  /// Makes an absent view.
  ConstTensor() : tilemoe_tensor{} {}
  /// Copies a view of the C interface.
  ConstTensor(const tilemoe_tensor& view) : tilemoe_tensor(view) {}

  /// Makes a contiguous view, the last dimension fastest. Throws Error for more than 3 dimensions.
  ConstTensor(const void* pointer, DType type, std::initializer_list<int64_t> dims)
      : tilemoe_tensor{} {
    assign(pointer, type, dims);
    int64_t step = 1;
    for (int i = ndim - 1; i >= 0; --i) {
      stride[i] = step;
      step *= shape[i];
    }
  }

  /// Makes a view with the given strides, in elements. Throws Error for more than 3 dimensions, or
  /// if the numbers of strides and dimensions differ.
  ConstTensor(const void* pointer, DType type, std::initializer_list<int64_t> dims,
              std::initializer_list<int64_t> strides)
      : tilemoe_tensor{} {
    assign(pointer, type, dims);
    if (strides.size() != dims.size())
      throw Error(Status::kInvalidArgument, "Tensor: the numbers of dimensions and strides differ");
    int i = 0;
    for (int64_t step : strides) stride[i++] = step;
  }

  /// Returns a view of the same memory with the last two dimensions exchanged: it makes the
  /// (E, 2n, d) that TileMoE requires from a checkpoint's (E, d, 2n). Throws Error for less than 2
  /// dimensions.
  ConstTensor transposed() const {
    ConstTensor view = *this;
    view.exchange_last_two();
    return view;
  }

  /// Returns false for an absent view.
  bool present() const { return ndim != 0; }

 protected:
  void exchange_last_two() {
    if (ndim < 2)
      throw Error(Status::kInvalidArgument, "Tensor::transposed requires at least 2 dimensions");
    const int a = ndim - 2, b = ndim - 1;
    const int64_t size = shape[a], step = stride[a];
    shape[a] = shape[b], stride[a] = stride[b];
    shape[b] = size, stride[b] = step;
  }

 private:
  // The C struct has no const pointer; the library writes to outputs only.
  void assign(const void* pointer, DType type, std::initializer_list<int64_t> dims) {
    if (dims.size() > TILEMOE_MAX_DIMS)
      throw Error(Status::kInvalidArgument, "Tensor: expected at most 3 dimensions");
    data = const_cast<void*>(pointer);
    dtype = to_c(type);
    for (int64_t size : dims) shape[ndim++] = size;
  }
};

/// A writable view, for outputs.
struct Tensor : ConstTensor {
  /// Makes an absent view.
  Tensor() = default;
  /// Copies a view of the C interface.
  Tensor(const tilemoe_tensor& view) : ConstTensor(view) {}
  /// Read-only memory is not an output.
  Tensor(const ConstTensor&) = delete;
  /// Makes a contiguous view, the last dimension fastest.
  Tensor(void* pointer, DType type, std::initializer_list<int64_t> dims)
      : ConstTensor(pointer, type, dims) {}
  /// Makes a view with the given strides, in elements.
  Tensor(void* pointer, DType type, std::initializer_list<int64_t> dims,
         std::initializer_list<int64_t> strides)
      : ConstTensor(pointer, type, dims, strides) {}

  /// Returns a view of the same memory with the last two dimensions exchanged.
  Tensor transposed() const {
    Tensor view = *this;
    view.exchange_last_two();
    return view;
  }
};

}  // namespace tilemoe
