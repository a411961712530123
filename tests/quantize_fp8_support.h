// Quantisation to e4m3 on any device, with guards around every array, against arithmetic of its own:
// a scale by frexp and ldexp, a code as the nearest of the 127 numbers of e4m3.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <limits>
#include <vector>

#include "core/backend.h"
#include "tilemoe/layer.h"
#include "verify/memory.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::test {

struct Fp8Case {
  int64_t E, R, C;
  int32_t block_rows = 1;
  int64_t part_rows = 0;
  bool float_scales = false;
  DType dtype = DType::kBFloat16;
  bool padded = false;      // gaps between rows
  bool transposed = false;  // both layouts are written
};

inline std::ostream& operator<<(std::ostream& out, const Fp8Case& c) {
  return out << "(" << c.E << ", " << c.R << ", " << c.C << "), blocks of " << c.block_rows
             << " rows, parts of " << c.part_rows << (c.float_scales ? ", float scales" : "")
             << ", dtype " << static_cast<int>(c.dtype) << (c.padded ? ", padded" : "")
             << (c.transposed ? ", transposed" : "");
}

// The magnitudes of the codes 0 to 0x7e.
inline std::vector<double> e4m3_magnitudes() {
  std::vector<double> magnitudes;
  for (int code = 0; code < 0x7f; ++code) {
    const int exponent = code >> 3, fraction = code & 7;
    magnitudes.push_back(exponent == 0 ? std::ldexp(fraction, -9)
                                       : std::ldexp(8 + fraction, exponent - 10));
  }
  return magnitudes;
}

inline uint8_t nearest_e4m3(float value) {
  static const std::vector<double> magnitudes = e4m3_magnitudes();
  if (std::isnan(value)) return 0x7f;
  const double magnitude = std::fabs(double{value});
  uint8_t best = 0;
  for (uint8_t code = 1; code < 0x7f; ++code) {
    const double closer =
        std::fabs(magnitudes[code] - magnitude) - std::fabs(magnitudes[best] - magnitude);
    if (std::isinf(magnitude) || closer < 0 || (closer == 0 && code % 2 == 0)) best = code;
  }
  return static_cast<uint8_t>(best | (std::signbit(value) ? 0x80 : 0));
}

inline float expected_factor(float amax, DType dtype, bool float_scales) {
  if (amax == 0 || std::isinf(amax)) return 1;
  float factor = 448.f / amax;
  if (std::isinf(factor))
    factor = dtype == DType::kFloat16    ? 65504.f
             : dtype == DType::kBFloat16 ? std::ldexp(255.f, 120)
                                         : std::numeric_limits<float>::max();
  int exponent;
  return float_scales ? factor : (std::frexp(factor, &exponent), std::ldexp(1.f, exponent - 1));
}

// `values`: (E, R, C) of the case's dtype.
inline void expect_fp8(verify::Memory& memory, const Fp8Case& of,
                       const std::vector<float>& values) {
  const auto [E, R, C, block_rows, part_rows, float_scales, dtype, padded, is_transposed] = of;
  const int64_t part = part_rows == 0 ? std::max<int64_t>(R, 1) : part_rows;
  const int64_t part_blocks = (part + block_rows - 1) / block_rows;
  const int64_t down = R / part * part_blocks, across = (C + 127) / 128;
  verify::GuardedTensor from(memory, dtype, {E, R, C}, {.padded = padded});
  from.write(values);
  verify::GuardedBuffer codes(memory, static_cast<size_t>(E * R * C)),
      scales(memory, static_cast<size_t>(E * down * across) * sizeof(float)),
      columns(memory, static_cast<size_t>(is_transposed ? E * R * C : 0)),
      column_scales(memory,
                    static_cast<size_t>(is_transposed ? E * down * across : 0) * sizeof(float));
  quantize_fp8(
      {.device = memory.device(),
       .values = from.view(),
       .codes = static_cast<uint8_t*>(codes.data()),
       .scales = static_cast<float*>(scales.data()),
       .block_rows = block_rows,
       .float_scales = float_scales,
       .part_rows = part_rows,
       .transposed_codes = is_transposed ? static_cast<uint8_t*>(columns.data()) : nullptr,
       .transposed_scales = is_transposed ? static_cast<float*>(column_scales.data()) : nullptr});
  ASSERT_TRUE(codes.guards_intact() && scales.guards_intact() && from.gaps_intact()) << of;
  ASSERT_TRUE(columns.guards_intact() && column_scales.guards_intact()) << of;
  const std::vector<std::byte> code_bytes = codes.read(), scale_bytes = scales.read();
  std::vector<float> got_scales(scale_bytes.size() / sizeof(float));
  std::memcpy(got_scales.data(), scale_bytes.data(), scale_bytes.size());

  std::vector<float> amax(got_scales.size(), 0.f);
  const auto block_of = [&, block_rows = block_rows, R = R, C = C](int64_t i) {
    const int64_t column = i % C, row = i / C % R, expert = i / C / R;
    const int64_t number = row / part * part_blocks + row % part / block_rows;
    return static_cast<size_t>((expert * down + number) * across + column / 128);
  };
  for (size_t i = 0; i < values.size(); ++i) {
    const float magnitude = std::fabs(values[i]);
    float& largest = amax[block_of(static_cast<int64_t>(i))];
    if (magnitude > largest) largest = magnitude;
  }
  for (size_t b = 0; b < amax.size(); ++b)
    ASSERT_EQ(got_scales[b], 1.f / expected_factor(amax[b], dtype, float_scales))
        << of << ": block " << b << ", amax " << amax[b];
  for (size_t i = 0; i < values.size(); ++i) {
    const float factor =
        expected_factor(amax[block_of(static_cast<int64_t>(i))], dtype, float_scales);
    ASSERT_EQ(static_cast<int>(code_bytes[i]), static_cast<int>(nearest_e4m3(values[i] * factor)))
        << of << ": value " << i << ", " << values[i] << " * " << factor;
  }
  if (!is_transposed) return;
  // Each element of (E, rows, columns) at its place in (E, columns, rows), of `size` bytes.
  const auto expect_transposed = [&, E = E, of = of](const auto& plain, const auto& turned,
                                                     int64_t rows, int64_t wide, size_t size) {
    for (int64_t i = 0; i < E * rows * wide; ++i) {
      const int64_t e = i / (rows * wide), row = i / wide % rows, column = i % wide;
      const int64_t to = (e * wide + column) * rows + row;
      ASSERT_EQ(std::memcmp(&plain[static_cast<size_t>(i) * size],
                            &turned[static_cast<size_t>(to) * size], size),
                0)
          << of << ": element " << i;
    }
  };
  expect_transposed(code_bytes, columns.read(), R, C, 1);
  expect_transposed(scale_bytes, column_scales.read(), down, across, sizeof(float));
}

// Normal values, each block of 8 of another size, with zeros, subnormal numbers, infinities and NaN
// among them.
inline void expect_fp8(verify::Memory& memory, const Fp8Case& of) {
  verify::Random random(21, 1);
  std::vector<float> values;
  const float special[] = {0.f, 1e-40f, NAN, INFINITY, -INFINITY, 6e-8f, 3.4e38f, -0.f};
  for (int64_t i = 0; i < of.E * of.R * of.C; ++i) {
    const int64_t kind = i / 8 % 257;
    double value = random.normal() * std::exp2(static_cast<double>(i / 1000 % 40) - 20);
    if (kind < 8 && i % 8 == 3) value = double{special[kind]};
    values.push_back(static_cast<float>(verify::round_to(of.dtype, value)));
  }
  expect_fp8(memory, of, values);
}

// The codes of a weight in both layouts.
inline void expect_both_layouts(verify::Memory& memory, Fp8Case of) {
  of.block_rows = 128, of.transposed = true;
  expect_fp8(memory, of);
}

// The step that quantises rows, of two parts: what it writes without an end, and with one nothing
// past it.
inline void expect_rows_before_end(verify::Memory& memory, const Backend& backend) {
  constexpr int64_t kRows = 300, kWidth = 136, kScaleBytes = 2 * sizeof(float);  // of a row
  verify::Random random(22, 1);
  std::vector<float> values;
  for (int64_t i = 0; i < kRows * 2 * kWidth; ++i)
    values.push_back(static_cast<float>(random.normal()));
  verify::GuardedTensor from(memory, DType::kBFloat16, {kRows, 2 * kWidth});
  from.write(values);
  verify::GuardedTensor end(memory, DType::kInt32, {1});
  const auto quantised = [&](const int32_t* rows) {
    verify::GuardedBuffer codes(memory, 2 * kRows * kWidth),
        scales(memory, 2 * kRows * kScaleBytes);
    codes.poison(), scales.poison();
    backend.steps.quantize_dH.run(
        {.values = from.view(),
         .out = {static_cast<uint8_t*>(codes.data()), static_cast<float*>(scales.data())},
         .float_scales = false,
         .stream = nullptr,
         .parts = 2,
         .end = rows});
    return std::vector{codes.read(), scales.read(), codes.poisoned(), scales.poisoned()};
  };
  const auto all = quantised(nullptr);
  for (const int32_t rows : {0, 1, 128, 137, 300}) {
    end.write({static_cast<float>(rows)});
    const auto got = quantised(static_cast<const int32_t*>(end.view().data));
    for (const bool is_scales : {false, true}) {
      const int64_t row_bytes = is_scales ? kScaleBytes : kWidth;
      std::vector<std::byte> expected = got[is_scales ? 3 : 2];  // poisoned
      for (int64_t part = 0; part < 2; ++part)
        std::copy_n(all[is_scales ? 1 : 0].begin() + part * kRows * row_bytes, rows * row_bytes,
                    expected.begin() + part * kRows * row_bytes);
      ASSERT_EQ(got[is_scales ? 1 : 0], expected)
          << (is_scales ? "scales" : "codes") << ", end " << rows;
    }
  }
}

// Blocks of zeros alone, of subnormal numbers alone, of NaN alone.
inline void expect_special_fp8(verify::Memory& memory, DType dtype, bool float_scales) {
  for (const float all : {0.f, -0.f, 1e-40f, 6e-8f, NAN, INFINITY, -65504.f, 3e38f})
    for (const int32_t block_rows : {1, 128}) {
      const auto value = static_cast<float>(verify::round_to(dtype, double{all}));
      expect_fp8(memory,
                 {.E = 1,
                  .R = 3,
                  .C = 136,
                  .block_rows = block_rows,
                  .float_scales = float_scales,
                  .dtype = dtype},
                 std::vector<float>(3 * 136, value));
    }
}

}  // namespace tilemoe::test
