// Values of quantised weights. A task is some rows of one expert; 8 values, which share a scale in
// every format, are computed at a time.
#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/formats.h"
#include "cpu/cpu_backend.h"
#include "cpu/elementwise.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kTogether = 8;
constexpr int64_t kTaskRows = 64;
constexpr int64_t kColumns = 512;  // at a time; a multiple of 8

std::array<float, 256> e4m3_numbers() {
  std::array<float, 256> numbers;
  for (size_t code = 0; code < numbers.size(); ++code)
    numbers[code] = e4m3_to_float(static_cast<uint8_t>(code));
  return numbers;
}
const std::array<float, 256> kE4m3 = e4m3_numbers();

// A value's place: its expert, row and column, and its number in the order of the codes.
struct Place {
  int64_t expert, row, column, number;
};

// The scale of the value at a place. The order of the products and the sum is that of the format's
// owner.
float scale_at(const tilemoe_quantized& weight, const Place& at, int64_t R, int64_t C) {
  const auto* const bytes = static_cast<const uint8_t*>(weight.scales);
  const auto* const floats = static_cast<const float*>(weight.scales);
  switch (weight.format) {
    case TILEMOE_FORMAT_FP8: {
      const int64_t down = blocks_of(R, kFp8Tile), across = blocks_of(C, kFp8Tile);
      return floats[(at.expert * down + at.row / kFp8Tile) * across + at.column / kFp8Tile];
    }
    case TILEMOE_FORMAT_MXFP4: return e8m0_to_float(bytes[at.number / kMxfp4Block]);
    case TILEMOE_FORMAT_NF4: return floats[at.number / kNf4Block];
    case TILEMOE_FORMAT_NF4_DOUBLE: {
      const int64_t block = at.number / kNf4Block;
      const float scaled =
          weight.scale_map[bytes[block]] * weight.scale_of_scales[block / kNf4NestedBlock];
      return scaled + *weight.scale_offset;
    }
    case TILEMOE_FORMAT_NVFP4:
      return weight.scale_of_scales[at.expert] * kE4m3[bytes[at.number / kNvfp4Block]];
    case TILEMOE_FORMAT_NONE: break;
  }
  return 0;
}

// 8 values from the one with this number on.
void read_values(const tilemoe_quantized& weight, int64_t number, float scale, float* to) {
  const auto* const codes = static_cast<const uint8_t*>(weight.codes);
  if (weight.format == TILEMOE_FORMAT_FP8) {
    for (int64_t i = 0; i < kTogether; ++i) to[i] = kE4m3[codes[number + i]] * scale;
    return;
  }
  const float* const numbers = numbers_of(weight.format);
  const int first = is_nf4(weight.format) ? 4 : 0;  // bit of the first value in a byte
  for (int64_t i = 0; i < kTogether; i += 2) {
    const uint8_t pair = codes[(number + i) / 2];
    to[i] = numbers[pair >> first & 0xf] * scale;
    to[i + 1] = numbers[pair >> (4 - first) & 0xf] * scale;
  }
}

void write_row(const Dequantize& step, int64_t in_block, int64_t row) {
  const int64_t R = step.out.shape[1], C = step.out.shape[2];
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(step.out.dtype));
  char* const to = static_cast<char*>(step.out.data) + (in_block * R + row) * C * element;
  Place at{step.first + in_block, row, 0, ((step.first + in_block) * R + row) * C};
  alignas(64) float values[kColumns];
  for (int64_t first = 0; first < C; first += kColumns) {
    const int64_t count = std::min(kColumns, C - first);
    for (int64_t i = 0; i < count; i += kTogether) {
      read_values(step.weight, at.number, scale_at(step.weight, at, R, C), values + i);
      at.column += kTogether, at.number += kTogether;
    }
    from_float(values, to + first * element, step.out.dtype, 1, count, /*add=*/false);
  }
}

}  // namespace

void dequantize(const Dequantize& step) {
  const int64_t rows = step.out.shape[1], tasks = blocks_of(rows, kTaskRows);
  parallel_for(step.out.shape[0] * tasks, [&](int64_t task, int /*worker*/) {
    const int64_t expert = task / tasks, first = task % tasks * kTaskRows;
    if (step.begins != nullptr && step.begins[expert] == step.ends[expert]) return;
    for (int64_t row = first; row < std::min(rows, first + kTaskRows); ++row)
      write_row(step, expert, row);
  });
}

}  // namespace tilemoe::cpu
