// Elementwise work on rows, by vectors as wide as the machine has them. Every `count` is a multiple
// of 8; rows need no alignment beyond their elements'. bfloat16 and float16 are rounded to the
// nearest, ties to even; NaN stays NaN.
#pragma once

#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

// The instruction set that these functions and those of activation.h run on.
const char* vector_target();

// to[i] = from[i * step]; step is 1 or 2.
void to_float(const void* from, tilemoe_dtype dtype, int64_t step, float* to, int64_t count);

// to[i * step] = from[i], or += if `add` is set (added in float32, rounded once). Elements in
// between are not touched. Any step.
void from_float(const float* from, void* to, tilemoe_dtype dtype, int64_t step, int64_t count,
                bool add);

// sum[i] += scale * from[i]
void add_scaled(const void* from, tilemoe_dtype dtype, float scale, float* sum, int64_t count);

// The sum of a[i] * b[i], both of `dtype`.
float dot(const void* a, const void* b, tilemoe_dtype dtype, int64_t count);

// Rows of a matrix to be added up for one token.
struct RowSum {
  tilemoe_dtype dtype;  // of all three
  const void* addend;   // (count); null: zero
  const void* rows;     // (M, count)
  int64_t row_stride;
  const int32_t* row;  // (terms) -1: no row
  int64_t terms;
  const float* scale;  // (M) by row; null: 1
  void* out;           // (count)
};
// out = addend + sum over the terms, in order, of scale * row.
void sum_rows(const RowSum& sum, int64_t count);

}  // namespace tilemoe::cpu
