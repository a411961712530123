// The quantised weights of a case in a device's memory.
#pragma once

#include <memory>
#include <string>
#include <vector>

#include "inputs.h"
#include "memory.h"
#include "tilemoe/layer.h"

namespace tilemoe::verify {

class QuantizedTensors {
 public:
  QuantizedTensors(const Inputs& inputs, Memory& memory);

  bool any() const { return !arrays_.empty(); }
  QuantizedWeights view() const;
  // `weights` with the strides of quantised ones, which are absent there.
  Weights with_shapes(Weights weights) const;
  // A line for each array that changed, or next to which something was written.
  std::vector<std::string> damage() const;

 private:
  struct Array {
    std::string name;
    GuardedBuffer buffer;
    uint64_t fingerprint;
  };
  Quantized place(const char* name, const QuantizedArrays& arrays, bool transposed);
  template <class Element>
  const Element* place(const std::string& name, const std::vector<Element>& values);

  const Case& case_;
  Memory& memory_;
  std::vector<Array> arrays_;
  Quantized W1_, W1_up_, W2_;
  Quantized W1_transposed_, W1_up_transposed_, W2_transposed_;  // of the fp8 recipe
};

}  // namespace tilemoe::verify
