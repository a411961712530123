// What one call of the library needs to know of the device that its tensors are on, and the way
// from torch's tensors to the C interface's views. call_cpu.cpp and call_cuda.cpp are its two
// beginnings: each library of the binding is linked with one of them.
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

// Of a list that has another length than its names, or its fields, have.
[[noreturn]] void refuse_length(const char* name, size_t size, size_t expected);

// An argument of an operator under its name in the schema: a tensor, null where it is absent, or a
// list of tensors that have a name each.
struct Argument {
  Argument(const char* its_name, const Tensor& its_tensor) : name(its_name), tensor(&its_tensor) {}
  Argument(const char* its_name, const MaybeTensor& its_tensor)
      : name(its_name), tensor(its_tensor ? &*its_tensor : nullptr) {}
  template <size_t kCount>
  Argument(const char* its_name, const char* const (&its_names)[kCount], const Tensors& its_list)
      : name(its_name), names(its_names), list(&its_list) {
    if (its_list.size() != kCount) refuse_length(name, its_list.size(), kCount);
  }

  const char* name;
  const Tensor* tensor = nullptr;
  const char* const* names = nullptr;
  const Tensors* list = nullptr;
};

// Of all of them; refused where they are on several.
torch::stable::Device device_of(std::initializer_list<Argument> arguments);

class Call {
 public:
  // `arguments` are all of the operator's tensors, also those that it does not read: torch chooses
  // an operator's library by any of them. CPU: torch's number of threads holds while the object
  // lives. CUDA: the tensors' device and its current stream do.
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

 private:
  torch::stable::Device torch_device_;
  tilemoe_device device_;
  void* stream_ = nullptr;
  std::shared_ptr<void> held_;  // a lock or a device guard
};

void set_ctas_per_sm(int64_t count);

// What torch's allocator has no memory for.
struct OutOfMemory : std::runtime_error {
  explicit OutOfMemory(const std::string& shape)
      : std::runtime_error("out of memory: tilemoe: no memory for a tensor of shape " + shape) {}
};

// Throws where a call of the library failed: a std::runtime_error that begins with the status, of
// which python/tilemoe/ops.py makes Python's exception. The type would not do: torch 2.11 makes a
// ValueError of std::invalid_argument, 2.15 does not.
void check(tilemoe_status status);
[[noreturn]] void refuse(const std::string& sentence);

// One of the C interface's enums, or its int32. It judges the value, but 2^32 would be its 0.
template <typename To>
To narrowed(const char* name, int64_t value) {
  if (value < std::numeric_limits<int32_t>::min() || value > std::numeric_limits<int32_t>::max())
    refuse(std::string(name) + " is " + std::to_string(value) + ", expected an integer of 32 bits");
  return static_cast<To>(value);
}

// "(4096, 512)"
std::string describe_shape(const Tensor& tensor);
void check_dims(const char* name, const Tensor& tensor, int64_t dims, const char* expected);

// A matrix whose rows are dense and do not overlap: the tensor itself where it is one, else a
// contiguous copy. `dense_rows_on_16` asks for rows on 16 bytes too, as those of X are.
Tensor dense_rows(const Tensor& tensor);
Tensor dense_rows_on_16(const Tensor& tensor);
// Of a weight (E, rows, columns), or a bias (E, rows), the tensor itself if it begins, and its rows
// lie, on 16 bytes, else a copy of the same layout. A weight of neither major stays as it is, for
// the library to refuse.
Tensor weight_on_16(const Tensor& weight);
// New memory in a weight's own layout: whichever of its last two dimensions is contiguous.
Tensor empty_like_weight(const Tensor& weight);

}  // namespace tilemoe_torch
