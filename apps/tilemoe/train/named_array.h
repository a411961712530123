// Arrays of the trainer that a checkpoint keeps.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "train/checkpoint.h"
#include "train/memory.h"

namespace tilemoe::train {

struct NamedArray {
  std::string name;
  std::vector<int64_t> shape;
  const FloatArray* array = nullptr;  // must outlive what refers to it
};

// Arrays as a checkpoint reads and writes them: in place if they lie in the host's memory, else
// copies.
class ArraysOnHost {
 public:
  ArraysOnHost() = default;
  // `in_place`: they lie in the host's memory.
  ArraysOnHost(std::vector<NamedArray> arrays, bool in_place) : arrays_(std::move(arrays)) {
    if (in_place) return;
    for (const NamedArray& one : arrays_) copies_.push_back(one.array->read());
  }

  // Valid while this lives.
  std::vector<TensorRef> tensors() {
    std::vector<TensorRef> tensors;
    for (size_t i = 0; i < arrays_.size(); ++i)
      tensors.push_back({arrays_[i].name, arrays_[i].shape,
                         copies_.empty() ? arrays_[i].array->data() : copies_[i].data()});
    return tensors;
  }
  // Writes the copies to the arrays.
  void write_back() const {
    for (size_t i = 0; i < copies_.size(); ++i) arrays_[i].array->write(copies_[i]);
  }

 private:
  std::vector<NamedArray> arrays_;
  std::vector<std::vector<float>> copies_;
};

}  // namespace tilemoe::train
