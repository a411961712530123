// Quantised weights as operators take them, and their views for the C interface.
#pragma once

#include <vector>

#include "call.h"
#include "packing.h"

namespace tilemoe_torch {

// The quantised weights of a call, whose arrays view() checks against the sizes of their formats.
// Without any, the operators' lists are empty.
class Quantized {
 public:
  Quantized() = default;
  // Only the formats, for calls that read no weights.
  explicit Quantized(const std::vector<int64_t>& formats);
  Quantized(const Tensors& arrays, const std::vector<int64_t>& formats);

  bool exist() const { return of(kW1) || of(kW1Up) || of(kW2); }
  // Whether the weight at this place of kWeightNames is quantised.
  bool of(size_t place) const { return place < kQuantizedWeights && formats_[place].format != 0; }

  void set_formats(tilemoe_experts& experts) const;
  // The arrays, of weights (E, rows, columns) with these shapes.
  tilemoe_quantized_weights view(const Tensors& weights) const;
  // `weights` with the shapes and strides of those that are quantised, without data.
  tilemoe_weights with_strides(tilemoe_weights weights, const Tensors& shapes) const;

 private:
  struct Format {
    int64_t format = 0;
    int64_t transposed = 0;
  };
  Format formats_[kQuantizedWeights];
  Tensors arrays_;
};

}  // namespace tilemoe_torch
