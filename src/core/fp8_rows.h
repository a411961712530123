// The fp8 recipes: which passes multiply codes, rows as e4m3 codes with scales, and the step that
// makes them.
#pragma once

#include <cstdint>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Whether the GEMMs of forward, or those of backward, multiply codes.
inline bool is_fp8(const tilemoe_experts& experts) {
  return experts.recipe != TILEMOE_RECIPE_BF16;
}
inline bool is_fp8_backward(const tilemoe_experts& experts) {
  return experts.recipe == TILEMOE_RECIPE_FP8;
}
// Whether H is saved as codes.
inline bool saves_fp8_H(const tilemoe_experts& experts) {
  return experts.format_H == TILEMOE_FORMAT_FP8;
}

// Rows as e4m3 codes with a scale per 128 columns (core/fp8.h), contiguous. Absent without codes. Of
// several parts, gate and up: first all rows of one, then all rows of the other.
struct Fp8Rows {
  uint8_t* codes = nullptr;  // (rows, width)
  float* scales = nullptr;   // (rows, width / 128 rounded up)

  bool given() const { return codes != nullptr; }
};

// H of the fp8 recipe as codes, of gate and up: 16 columns of gate and the same columns of up have the
// bytes that these columns of A' have in 16 bits, which may lie over them. In 16 columns the order is
// that in which a lane of a tensor core has them, so that 8-bit fragments are loaded as 16-bit ones.
struct Fp8H {
  uint8_t* codes = nullptr;  // (capacity, 2n)
  float* scales = nullptr;   // (capacity, n / 128 rounded up, 2)

  bool given() const { return codes != nullptr; }
};
inline constexpr int64_t kFp8HColumns = 16;
// Where the code of column `column` of gate (half 0) or up is in its row.
constexpr int64_t place_in_fp8_H(int half, int64_t column) {
  const int64_t in_group = column % kFp8HColumns;
  return (column / kFp8HColumns * 2 + half) * kFp8HColumns + in_group % 8 / 2 * 4 +
         in_group / 8 * 2 + in_group % 2;
}

// The fp8 recipe: values as codes, of one row or more.
struct QuantizeRows {
  tilemoe_tensor values;  // (rows, parts * width)
  Fp8Rows out;            // (parts, rows, width)
  bool float_scales;      // else powers of two
  void* stream;
  int64_t parts = 1;
  const int32_t* end = nullptr;  // on the values' device: only the rows before *end; null: all

  tilemoe_quantize_fp8_args arguments() const {
    tilemoe_tensor matrix = values;
    matrix.ndim = 3;
    for (int i = 2; i > 0; --i)
      matrix.shape[i] = values.shape[i - 1], matrix.stride[i] = values.stride[i - 1];
    matrix.shape[2] /= parts;
    matrix.shape[0] = parts, matrix.stride[0] = matrix.shape[2];
    tilemoe_quantize_fp8_args args{};
    args.block_rows = 1, args.float_scales = float_scales ? 1 : 0;
    args.part_rows = values.shape[0], args.values = matrix;
    args.codes = out.codes, args.scales = out.scales, args.stream = stream;
    return args;
  }
};

}  // namespace tilemoe
