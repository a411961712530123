// GEMMs of e4m3 codes with block scales, to the bit as Hopper's tensor cores sum them.
#pragma once

#include <cstdint>

#include "core/backend.h"

namespace tilemoe::cpu {

// Rows of codes from row `first` on, gathered by `index` if it is given.
struct Fp8Tile {
  Fp8Rows codes;
  int64_t width;
  const int32_t* index;
  int64_t first;
};

// Rows of an expert's weight of format FP8 from row `first` on, a multiple of 64: of `rows` rows in
// all. Their `width` columns from `column` on, a multiple of 128, are summed over.
struct Fp8Operand {
  const tilemoe_quantized* weight;
  int64_t rows, width, expert, first;
  int64_t column = 0, all_columns = width;
};

// C (rows, columns) = A B^T, or with `add` C += A B^T. Each block of 128 terms is summed by steps of 32 as `wgmma` sums them: 13
// fraction bits, cut off towards zero. Its sum, times both scales, is added in float32.
void multiply_fp8(int64_t rows, int64_t columns, const Fp8Tile& A, const Fp8Operand& B, bool add,
                  float* C, int64_t row_stride);

// Writes the codes of `columns` values of a row of A, from column `first` on, a multiple of 128.
void store_codes(const UpProjection& step, int64_t row, int64_t first, int64_t columns,
                 const float* values);
// The same of the columns of H that make these columns of A.
void store_codes_of_H(const UpProjection& step, int64_t row, int64_t first, int64_t columns,
                      const float* gate, const float* up);
// Reads `columns` columns of gate (half 0) or up of a row of H, from column `first` on: code * scale,
// rounded to the dtype.
void read_codes_of_H(const Fp8H& H, int64_t n, int64_t row, int half, int64_t first,
                     int64_t columns, tilemoe_dtype dtype, float* values);

}  // namespace tilemoe::cpu
