// The three floating types of tensors, by arithmetic alone: the reference for the library's own
// conversions.
#pragma once

#include <cstdint>

#include "tilemoe/tensor.h"

namespace tilemoe::verify {

// The value of `dtype` nearest to x, ties to even; infinity past the largest.
double round_to(DType dtype, double x);

// The bits of a 16-bit value, and back. encode rounds as round_to does.
uint16_t encode_16bit(DType dtype, double x);
double decode_16bit(DType dtype, uint16_t bits);

// Reads or writes element `index` of an array of any dtype, integers included.
double load(DType dtype, const void* array, int64_t index);
void store(DType dtype, void* array, int64_t index, double value);

}  // namespace tilemoe::verify
