// Shared by the model's layers: the operators of their device, and memory in which nothing
// outlives the call that wrote it.
#pragma once

#include <algorithm>
#include <cstddef>

#include "train/operators.h"

namespace tilemoe::train {

// Each layer says what it needs when it is built; allocate() then takes the most of each.
class Workspace {
 public:
  // `memory`: that of its arrays, if it is not that of the operators.
  explicit Workspace(Operators& operators, Memory* memory = nullptr)
      : operators_(operators), memory_(memory != nullptr ? *memory : operators.memory()) {}

  Operators& operators() const { return operators_; }
  FloatArray floats(int64_t count) const { return FloatArray(count, memory_); }
  template <class Element>
  Array<Element> array(int64_t count) const {
    return Array<Element>(count, memory_);
  }

  void need_scratch(int64_t floats) { scratch_floats_ = std::max(scratch_floats_, floats); }
  void need_library(size_t bytes) { library_bytes_ = std::max(library_bytes_, bytes); }

  void allocate() {
    scratch_ = floats(scratch_floats_);
    library_ = array<std::byte>(static_cast<int64_t>(library_bytes_));
  }

  std::span<float> scratch() const { return scratch_.span(); }  // for one operator
  void* library() const { return library_.data(); }             // for one call of the library
  size_t library_bytes() const { return library_bytes_; }

 private:
  Operators& operators_;
  Memory& memory_;
  int64_t scratch_floats_ = 0;
  size_t library_bytes_ = 0;
  FloatArray scratch_;
  Array<std::byte> library_;
};

}  // namespace tilemoe::train
