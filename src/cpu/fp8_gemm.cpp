#include "cpu/fp8_gemm.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>

#include "core/check.h"
#include "core/formats.h"
#include "core/fp8.h"
#include "cpu/elementwise.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kTerms = kFp8Tile;  // of a block, between promotions
constexpr int64_t kSteps = 32;        // terms of an instruction
constexpr int64_t kColumns = 64;      // that are summed together: they share a block of scales
constexpr int kFractionBits = 13;
constexpr uint32_t kFractionMask = 0xffffffffu << (23 - kFractionBits);

// A code as its value, NaN as 0, and as the exponent that tensor cores align it by: subnormals and
// zeros have that of the smallest normal number.
struct Decoded {
  float value[256];
  int16_t exponent[256];
};

Decoded decode() {
  Decoded all{};
  for (int code = 0; code < 256; ++code) {
    const float value = e4m3_to_float(static_cast<uint8_t>(code));
    all.value[code] = std::isnan(value) ? 0.f : value;
    all.exponent[code] = static_cast<int16_t>(std::max(code >> 3 & 0xf, 1) - 7);
  }
  return all;
}

const Decoded kDecoded = decode();

bool is_nan(uint8_t code) {
  return (code & 0x7f) == 0x7f;
}

// A block of B^T: the terms of `kColumns` columns. Those past the ends are zero.
struct Block {
  alignas(64) float value[kTerms][kColumns];
  alignas(64) int16_t exponent[kTerms][kColumns];
  bool has_nan[kColumns];

  void read(const uint8_t* codes, int64_t stride, int64_t columns, int64_t terms) {
    for (int64_t j = 0; j < kColumns; ++j) has_nan[j] = false;
    for (int64_t k = 0; k < kTerms; ++k)
      for (int64_t j = 0; j < kColumns; ++j) {
        const uint8_t code = j < columns && k < terms ? codes[j * stride + k] : uint8_t{0};
        value[k][j] = kDecoded.value[code];
        exponent[k][j] = kDecoded.exponent[code];
        has_nan[j] |= is_nan(code);
      }
  }
};

float power_of_two(int exponent) {
  return order::from_bits((exponent + 127) << 23);
}

// One instruction: sum[j] += the products of 32 codes with those of column j.
void add_mma(const uint8_t* codes, const Block& B, int64_t first, float* sum) {
  alignas(64) int16_t top[kColumns];
  alignas(64) float scale[kColumns];
  alignas(64) int32_t total[kColumns];
  for (int64_t j = 0; j < kColumns; ++j) {
    const int biased = order::bits_of(sum[j]) >> 23 & 0xff;
    top[j] = static_cast<int16_t>(std::max(biased, 1) - 127);
  }
  for (int64_t k = 0; k < kSteps; ++k) {
    const int16_t exponent = kDecoded.exponent[codes[k]];
    const int16_t* const other = B.exponent[first + k];
    for (int64_t j = 0; j < kColumns; ++j) {
      const auto of_both = static_cast<int16_t>(exponent + other[j]);
      top[j] = of_both > top[j] ? of_both : top[j];
    }
  }
  // In units of the last bit that is kept, a product is below 2^16.
  for (int64_t j = 0; j < kColumns; ++j) {
    scale[j] = power_of_two(kFractionBits - top[j]);
    total[j] = static_cast<int32_t>(sum[j] * scale[j]);
  }
  for (int64_t k = 0; k < kSteps; ++k) {
    const float value = kDecoded.value[codes[k]];
    const float* const other = B.value[first + k];
    for (int64_t j = 0; j < kColumns; ++j)
      total[j] += static_cast<int32_t>(value * other[j] * scale[j]);
  }
  for (int64_t j = 0; j < kColumns; ++j) {
    const float all = static_cast<float>(total[j]) * power_of_two(top[j] - kFractionBits);
    sum[j] = order::from_bits(
        static_cast<int32_t>(static_cast<uint32_t>(order::bits_of(all)) & kFractionMask));
  }
}

// C += the products of the row's codes with the block, times the scale.
void add_block(const uint8_t* codes, const Block& B, float scale, int64_t columns, float* C) {
  alignas(64) float sum[kColumns] = {};
  for (int64_t first = 0; first < kTerms; first += kSteps) add_mma(codes + first, B, first, sum);
  const bool row_has_nan = std::any_of(codes, codes + kTerms, is_nan);
  for (int64_t j = 0; j < columns; ++j) {
    if (row_has_nan || B.has_nan[j]) sum[j] = std::numeric_limits<float>::quiet_NaN();
    C[j] = std::fmaf(sum[j], scale, C[j]);
  }
}

}  // namespace

void multiply_fp8(int64_t rows, int64_t columns, const Fp8Tile& A, const Fp8Operand& B, bool add,
                  float* C, int64_t row_stride) {
  const int64_t width = A.width, across = blocks_of(width, kTerms);
  const int64_t first_scale = B.column / kTerms, stride = B.all_columns;
  const auto* const codes = static_cast<const uint8_t*>(B.weight->codes);
  const auto* const scales = static_cast<const float*>(B.weight->scales);
  for (int64_t i = 0; i < rows && !add; ++i) std::fill_n(C + i * row_stride, columns, 0.f);
  Block block;
  alignas(64) uint8_t terms[kTerms];
  for (int64_t first = 0; first < columns; first += kColumns) {
    const int64_t row_of_B = B.first + first, some = std::min(kColumns, columns - first);
    const int64_t of_scales = B.expert * blocks_of(B.rows, kFp8Tile) + row_of_B / kFp8Tile;
    const float* const scale_of = scales + of_scales * blocks_of(stride, kTerms) + first_scale;
    for (int64_t b = 0; b < across; ++b) {
      const int64_t begin = b * kTerms, count = std::min(kTerms, width - begin);
      block.read(codes + (B.expert * B.rows + row_of_B) * stride + B.column + begin, stride, some,
                 count);
      for (int64_t i = 0; i < rows; ++i) {
        const int64_t row = A.index ? int64_t{A.index[A.first + i]} : A.first + i;
        std::copy_n(A.codes.codes + row * width + begin, count, terms);
        std::fill(terms + count, terms + kTerms, uint8_t{0});
        const float scale = A.codes.scales[row * across + b] * scale_of[b];
        add_block(terms, block, scale, some, C + i * row_stride + first);
      }
    }
  }
}

namespace {

// The factor of the codes of a block.
float factor_of(const UpProjection& step, const float* values, int64_t count) {
  float amax = 0;
  for (int64_t j = 0; j < count; ++j) {
    const float magnitude = std::fabs(values[j]);
    amax = magnitude > amax ? magnitude : amax;  // not a NaN
  }
  return fp8_factor(amax, largest_of(step.experts->dtype), !step.float_scales);
}

}  // namespace

void store_codes(const UpProjection& step, int64_t row, int64_t first, int64_t columns,
                 const float* values) {
  const int64_t n = step.experts->n, across = blocks_of(n, kFp8Tile);
  for (int64_t begin = 0; begin < columns; begin += kFp8Tile) {
    const int64_t count = std::min(kFp8Tile, columns - begin);
    const float factor = factor_of(step, values + begin, count);
    uint8_t* const codes = step.A_codes.codes + row * n + first + begin;
    for (int64_t j = 0; j < count; ++j) codes[j] = to_e4m3(values[begin + j] * factor);
    step.A_codes.scales[row * across + (first + begin) / kFp8Tile] = 1.f / factor;
  }
}

void store_codes_of_H(const UpProjection& step, int64_t row, int64_t first, int64_t columns,
                      const float* gate, const float* up) {
  const int64_t n = step.experts->n, across = blocks_of(n, kFp8Tile);
  uint8_t* const codes = step.H_codes.codes + row * 2 * n;
  for (int half = 0; half < 2; ++half) {
    const float* const values = half == 0 ? gate : up;
    for (int64_t begin = 0; begin < columns; begin += kFp8Tile) {
      const int64_t count = std::min(kFp8Tile, columns - begin), column = first + begin;
      const float factor = factor_of(step, values + begin, count);
      for (int64_t j = 0; j < count; ++j)
        codes[place_in_fp8_H(half, column + j)] = to_e4m3(values[begin + j] * factor);
      step.H_codes.scales[(row * across + column / kFp8Tile) * 2 + half] = 1.f / factor;
    }
  }
}

void read_codes_of_H(const Fp8H& H, int64_t n, int64_t row, int half, int64_t first,
                     int64_t columns, tilemoe_dtype dtype, float* values) {
  const uint8_t* const codes = H.codes + row * 2 * n;
  const float* const scales = H.scales + row * 2 * blocks_of(n, kFp8Tile) + half;
  for (int64_t j = 0; j < columns; ++j) {
    const int64_t column = first + j;
    values[j] = e4m3_to_float(codes[place_in_fp8_H(half, column)]) * scales[column / kFp8Tile * 2];
  }
  if (dtype == TILEMOE_FLOAT32) return;
  alignas(64) uint16_t rounded[kColumns];
  for (int64_t j = 0; j < columns; j += kColumns) {
    const int64_t count = std::min(kColumns, columns - j);
    from_float(values + j, rounded, dtype, 1, count, false);
    to_float(rounded, dtype, 1, values + j, count);
  }
}

}  // namespace tilemoe::cpu
