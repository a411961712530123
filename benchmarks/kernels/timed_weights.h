// Quantised weights of a timed layer, with random codes, and the bytes that they have.
#pragma once

#include <memory>
#include <vector>

#include "tilemoe/layer.h"
#include "verify/case.h"
#include "verify/memory.h"
#include "verify/quantized.h"

namespace tilemoe::app {

// Bytes of codes and scales per value of a weight.
double bytes_per_value(Format format);

class TimedWeights {
 public:
  TimedWeights(const verify::Case& layer, verify::Memory& memory);
  const QuantizedWeights* view() const { return any_ ? &view_ : nullptr; }

 private:
  QuantizedWeights place(const verify::Case& layer, bool transposed);
  Quantized place(Format format, bool transposed, int64_t rows, int64_t columns);
  template <class Element>
  const Element* place(const std::vector<Element>& values);

  verify::Memory& memory_;
  int64_t E_;
  std::vector<std::shared_ptr<void>> arrays_;
  bool any_;
  QuantizedWeights view_;
};

}  // namespace tilemoe::app
