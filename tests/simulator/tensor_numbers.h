// The operands of these tests' tcgen05 kernels, and the expected results.
#pragma once

#include <gtest/gtest.h>

#include <bit>
#include <cstddef>
#include <cstdint>
#include <vector>

namespace tilemoe::simulator_test {

inline float value_of(size_t i) {
  return static_cast<float>(i * 7 % 13) - 6;
}

// The values from `from` on, in bfloat16.
inline std::vector<uint16_t> numbers(size_t count, size_t from) {
  std::vector<uint16_t> bits(count);
  for (size_t i = 0; i < count; ++i)
    bits[i] = static_cast<uint16_t>(std::bit_cast<uint32_t>(value_of(i + from)) >> 16);
  return bits;
}

// Expects out (rows, width) = numbers(rows * steps, 0) numbers(width * steps, 5)^T.
inline void expect_gemm(const std::vector<float>& out, size_t rows, size_t width, size_t steps) {
  ASSERT_EQ(out.size(), rows * width);
  for (size_t row = 0; row < rows; ++row)
    for (size_t column = 0; column < width; ++column) {
      float sum = 0;
      for (size_t k = 0; k < steps; ++k)
        sum += value_of(row * steps + k) * value_of(column * steps + k + 5);
      ASSERT_EQ(out[row * width + column], sum) << row << ", " << column;
    }
}

}  // namespace tilemoe::simulator_test
