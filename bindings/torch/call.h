// The device state of one call of the library, and the conversion of torch's tensors to the C
// interface's views. call_cpu.cpp and call_cuda.cpp define its constructor: each library of the
// binding is linked with one of them.
#pragma once

#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <initializer_list>
#include <limits>
#include <memory>
#include <optional>
#include <stdexcept>
#include <string>
#include <vector>

#include "tilemoe/tilemoe.h"

namespace tilemoe_torch {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

using MaybeTensor = std::optional<Tensor>;
using Tensors = std::vector<MaybeTensor>;  // Tensor?[]

// Throws for a list whose length is not that of its names or fields.
[[noreturn]] void refuse_length(const char* name, size_t size, size_t expected);

// An argument of an operator with its name in the schema: a tensor, null if it is absent, or a list
// of tensors with a name each.
struct Argument {
  Argument(const char* its_name, const Tensor& its_tensor) : name(its_name), tensor(&its_tensor) {}
  Argument(const char* its_name, const MaybeTensor& its_tensor)
      : name(its_name), tensor(its_tensor ? &*its_tensor : nullptr) {}
  template <size_t kCount>
  Argument(const char* its_name, const char* const (&its_names)[kCount], const Tensors& its_list,
           bool may_be_empty = false)
      : name(its_name), names(its_names), list(&its_list) {
    if (its_list.size() != kCount && !(may_be_empty && its_list.empty()))
      refuse_length(name, its_list.size(), kCount);
  }

  const char* name;
  const Tensor* tensor = nullptr;
  const char* const* names = nullptr;
  const Tensors* list = nullptr;
};

// The device of all tensors. Throws if they are on several devices.
torch::stable::Device device_of(std::initializer_list<Argument> arguments);

class Call {
 public:
  // `arguments` are all of the operator's tensors, also those that it does not read: torch chooses
  // an operator's library by any of them. While the object lives, the library on the CPU keeps
  // torch's number of threads, and on CUDA the tensors' device is current.
  explicit Call(std::initializer_list<Argument> arguments);

  tilemoe_device device() const { return device_; }
  void* stream() const { return stream_; }
  // The value that tilemoe.set_ctas_per_sm last set, for forward and backward.
  static int32_t ctas_per_sm();

  // The tensor as the C interface sees it.
  tilemoe_tensor view(const char* name, const Tensor& tensor) const;
  tilemoe_tensor view(const char* name, const MaybeTensor& tensor) const;

  // Uninitialised and contiguous, from torch's allocator.
  Tensor empty(std::initializer_list<int64_t> shape, ScalarType dtype) const;
  Tensor zeros(std::initializer_list<int64_t> shape, ScalarType dtype) const;
  Tensor bytes(size_t count) const;
  // A contiguous view of some of these bytes, which must outlive it.
  Tensor matrix_in(const Tensor& bytes, size_t offset, int64_t rows, int64_t columns,
                   ScalarType dtype) const;

  // By the kernels of torch.mm, torch.addmm and torch.add, with their bits, without the dispatcher.
  // out (rows, columns) = A B, or bias (columns) + A B.
  void mm(const Tensor& out, const Tensor& A, const Tensor& B, const MaybeTensor& bias) const;
  Tensor add(const Tensor& a, const Tensor& b) const;

 private:
  torch::stable::Device torch_device_;
  tilemoe_device device_;
  void* stream_ = nullptr;
  std::shared_ptr<void> guard_;  // a lock or a device guard
};

void zero(const Tensor& tensor);
// The tensor itself if it is contiguous, at any address, else a copy.
Tensor dense(const Tensor& tensor);

void set_ctas_per_sm(int64_t count);

// Torch's allocator has no memory for a tensor.
struct OutOfMemory : std::runtime_error {
  explicit OutOfMemory(const std::string& shape)
      : std::runtime_error("out of memory: cannot allocate a tensor with shape " + shape) {}
};

// Throws if a call of the library failed: a std::runtime_error that begins with the status, which
// python/tilemoe/ops.py converts to Python's exception. The C++ type is not enough: torch 2.11
// converts std::invalid_argument to a ValueError, 2.15 does not.
void check(tilemoe_status status);
[[noreturn]] void refuse(const std::string& sentence);

// One of the C interface's enums, or its int32. The library checks the value, but would read 2^32
// as 0.
template <typename To>
To narrowed(const char* name, int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
    refuse(std::string(name) + " is " + std::to_string(value) + ", expected a 32-bit integer");
  return static_cast<To>(value);
}

// "(4096, 512)"
std::string describe_shape(const Tensor& tensor);
void check_dims(const char* name, const Tensor& tensor, int64_t dims, const char* expected);

// A matrix whose rows are dense and do not overlap: the tensor itself if possible, else a
// contiguous copy. `dense_rows_on_16` also requires rows on 16 bytes, like those of X.
Tensor dense_rows(const Tensor& tensor);
Tensor dense_rows_on_16(const Tensor& tensor);
// A weight (E, rows, columns), or a bias (E, rows): the tensor itself if it and its rows begin on
// 16 bytes, else a copy with the same layout. A weight that is neither row-major nor column-major
// is returned unchanged, and the library rejects it.
Tensor weight_on_16(const Tensor& weight);
// A view (columns, rows) of a matrix.
Tensor transposed(const Tensor& matrix);
// New memory with the weight's layout: contiguous in the same one of the last two dimensions.
Tensor empty_like_weight(const Tensor& weight);

}  // namespace tilemoe_torch
