// Quantised weights of a case: random codes and scales, and the values that they stand for, by
// arithmetic of its own.
#pragma once

#include <cstdint>
#include <vector>

#include "random.h"
#include "tilemoe/layer.h"

namespace tilemoe::verify {

// The arrays of tilemoe_quantized, of (E, R, C) values in the order of the codes.
struct QuantizedArrays {
  Format format = Format::kNone;
  int64_t E = 0, R = 0, C = 0;
  std::vector<uint8_t> codes = {};
  std::vector<uint8_t> byte_scales = {};    // MXFP4, NF4_DOUBLE, NVFP4
  std::vector<float> float_scales = {};     // FP8, NF4
  std::vector<float> scale_map = {};        // NF4_DOUBLE
  std::vector<float> scale_of_scales = {};  // NF4_DOUBLE, NVFP4
  std::vector<float> scale_offset = {};     // NF4_DOUBLE
};

// Arrays of the sizes that the format has, all zeros.
QuantizedArrays zero_arrays(Format format, int64_t E, int64_t R, int64_t C);

// Random codes, and scales that give the values about this deviation.
QuantizedArrays random_arrays(Format format, int64_t E, int64_t R, int64_t C, double deviation,
                              Random& random);
// FP8: the same values as (E, C, R).
QuantizedArrays transposed(const QuantizedArrays& arrays);

// Values of -1, 0 and 1, one in `sparsity` of them drawn, the rest 0.
QuantizedArrays whole_arrays(Format format, int64_t E, int64_t R, int64_t C, int64_t sparsity,
                             Random& random);

// The weight of these arrays: place(field, values) moves one to a device's memory and returns its
// address, null for an empty one.
template <class Place>
Quantized placed(const QuantizedArrays& arrays, bool transposed, const Place& place) {
  Quantized weight{.format = arrays.format, .transposed = transposed};
  weight.codes = place("codes", arrays.codes);
  weight.scales = place("scales", arrays.float_scales);
  if (weight.scales == nullptr) weight.scales = place("scales", arrays.byte_scales);
  weight.scale_map = place("scale_map", arrays.scale_map);
  weight.scale_of_scales = place("scale_of_scales", arrays.scale_of_scales);
  weight.scale_offset = place("scale_offset", arrays.scale_offset);
  return weight;
}

// The values in float32, in the order of the codes. Code times scale is rounded to float32, and so
// is a scale times another one.
std::vector<float> values_of(const QuantizedArrays& arrays);

}  // namespace tilemoe::verify
