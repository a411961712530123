// Compares a step's outputs on the device with the CPU backend's on the host.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "cuda/device_tensors.h"

namespace tilemoe::test {

// First element that differs by value, NaN equal to NaN; -1 if none does.
inline int64_t first_difference(const TwinTensor& tensor, const std::vector<uint8_t>& got,
                                const std::vector<uint8_t>& expected) {
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const double a = tensor.at(got, i), b = tensor.at(expected, i);
    if (!(a == b) && !(std::isnan(a) && std::isnan(b))) return i;
  }
  return -1;
}

inline double relative_error(const TwinTensor& tensor, const std::vector<uint8_t>& got,
                             const std::vector<uint8_t>& expected) {
  double error = 0, norm = 0;
  for (int64_t i = 0; i < tensor.elements(); ++i) {
    const double a = tensor.at(got, i), b = tensor.at(expected, i);
    if (std::isnan(a) && std::isnan(b)) continue;  // untouched on both sides
    error += (a - b) * (a - b);
    norm += b * b;
  }
  return std::sqrt(error / norm);
}

// Small whole numbers (`exact`) give equal values, others close ones; the guards are untouched.
inline void expect_equal(TwinTensor& tensor, const std::vector<uint8_t>& got, bool exact,
                         double tolerance) {
  const std::vector<uint8_t>& expected = tensor.buffer().host_bytes();
  if (exact) {
    const int64_t at = first_difference(tensor, got, expected);
    if (at >= 0) {
      const int64_t width = tensor.host().shape[tensor.host().ndim - 1];
      ADD_FAILURE() << "place " << at << " of rows of " << width << ": " << tensor.at(got, at)
                    << ", expected " << tensor.at(expected, at);
    }
  } else {
    EXPECT_LT(relative_error(tensor, got, expected), tolerance);
  }
  const auto guard = static_cast<std::ptrdiff_t>(TwinBuffer::kGuard);
  EXPECT_TRUE(std::equal(got.begin(), got.begin() + guard, expected.begin()));
  EXPECT_TRUE(std::equal(got.end() - guard, got.end(), expected.end() - guard));
}

}  // namespace tilemoe::test
