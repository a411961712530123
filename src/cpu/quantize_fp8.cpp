// Codes and scales of the fp8 recipe (core/fp8.h). A task is the blocks of some rows of an expert.
#include <algorithm>
#include <cmath>

#include "core/check.h"
#include "core/fp8.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

// A block of the values of an expert: `rows` rows from `row` on, `columns` columns from `column` on.
struct Block {
  int64_t expert, row, rows, column, columns;
};

// The codes of a block. Returns its scale.
float write_block(const tilemoe_quantize_fp8_args& args, const Block& block) {
  const tilemoe_tensor& from = args.values;
  const int64_t R = from.shape[1], C = from.shape[2];
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(from.dtype));
  alignas(64) float values[kFp8Tile][kFp8Tile];
  float amax = 0;
  for (int64_t i = 0; i < block.rows; ++i) {
    const int64_t place =
        block.expert * from.stride[0] + (block.row + i) * from.stride[1] + block.column;
    to_float(static_cast<const char*>(from.data) + place * element, from.dtype, 1, values[i],
             block.columns);
    for (int64_t j = 0; j < block.columns; ++j) {
      const float magnitude = std::fabs(values[i][j]);
      amax = magnitude > amax ? magnitude : amax;  // not a NaN
    }
  }
  const float factor = fp8_factor(amax, largest_of(from.dtype), args.float_scales == 0);
  for (int64_t i = 0; i < block.rows; ++i) {
    uint8_t* const codes = args.codes + (block.expert * R + block.row + i) * C + block.column;
    for (int64_t j = 0; j < block.columns; ++j) codes[j] = to_e4m3(values[i][j] * factor);
    if (args.transposed_codes == nullptr) continue;
    uint8_t* const column =
        args.transposed_codes + (block.expert * C + block.column) * R + block.row + i;
    for (int64_t j = 0; j < block.columns; ++j) column[j * R] = codes[j];
  }
  return 1.f / factor;
}

// The codes of the rows before `end` of each expert.
void quantize_rows_before(int64_t end, const tilemoe_quantize_fp8_args& args) {
  const int64_t E = args.values.shape[0], R = args.values.shape[1], C = args.values.shape[2];
  const int64_t part_rows = args.part_rows, part_blocks = blocks_of(part_rows, args.block_rows);
  const int64_t down = R / part_rows * part_blocks, across = blocks_of(C, kFp8Tile);
  parallel_for(E * down, [&](int64_t task, int /*worker*/) {
    const int64_t expert = task / down, number = task % down;
    const int64_t in_part = number % part_blocks * args.block_rows;
    const int64_t row = number / part_blocks * part_rows + in_part;
    if (row >= end) return;
    for (int64_t b = 0; b < across; ++b) {
      const float scale =
          write_block(args, {.expert = expert,
                             .row = row,
                             .rows = std::min<int64_t>(args.block_rows, part_rows - in_part),
                             .column = b * kFp8Tile,
                             .columns = std::min(kFp8Tile, C - b * kFp8Tile)});
      args.scales[task * across + b] = scale;
      if (args.transposed_scales != nullptr)
        args.transposed_scales[(expert * across + b) * down + number] = scale;
    }
  });
}

}  // namespace

void quantize_fp8(const tilemoe_quantize_fp8_args& args) {
  quantize_rows_before(args.values.shape[1], args);
}

void quantize_rows(const QuantizeRows& step) {  // of one row a block
  quantize_rows_before(step.end == nullptr ? step.values.shape[0] : *step.end, step.arguments());
}

}  // namespace tilemoe::cpu
