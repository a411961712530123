// Float64 stand-ins and central differences, with which the trainer's float32 code is compared.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <span>
#include <string>
#include <vector>

#include "train/random.h"

namespace tilemoe::train {

using Doubles = std::vector<double>;
using FloatVec = std::vector<float>;

inline FloatVec zeros(int64_t count) {
  return FloatVec(static_cast<size_t>(count));
}
inline size_t at(int64_t i) {
  return static_cast<size_t>(i);
}

inline Doubles random_doubles(const std::string& name, int64_t count) {
  const RandomStream random(7, name);
  Doubles values(static_cast<size_t>(count));
  for (size_t i = 0; i < values.size(); ++i) values[i] = static_cast<float>(random.normal(i));
  return values;
}

inline FloatVec to_float(const Doubles& values) {
  return {values.begin(), values.end()};
}

inline double inner(std::span<const double> a, std::span<const double> b) {
  double sum = 0;
  for (size_t i = 0; i < a.size(); ++i) sum += a[i] * b[i];
  return sum;
}

// |got - want| / |want|, NaN if anything is.
inline double relative_error(std::span<const float> got, const Doubles& want) {
  if (got.size() != want.size()) return NAN;
  double difference = 0, norm = 0;
  for (size_t i = 0; i < want.size(); ++i) {
    difference += (got[i] - want[i]) * (got[i] - want[i]);
    norm += want[i] * want[i];
  }
  return std::sqrt(difference / norm);
}

// The gradient of a function of x, which it changes and puts back.
inline Doubles central_differences(Doubles& x, const std::function<double()>& function) {
  constexpr double kStep = 1e-5;
  Doubles gradient(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double before = x[i];
    x[i] = before + kStep;
    const double above = function();
    x[i] = before - kStep;
    gradient[i] = (above - function()) / (2 * kStep);
    x[i] = before;
  }
  return gradient;
}

constexpr double kFloatTolerance = 3e-6;

}  // namespace tilemoe::train
