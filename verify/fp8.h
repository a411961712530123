// The rounding of the fp8 recipe, by arithmetic of its own: the values that codes and scales stand
// for.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>

namespace tilemoe::verify {

// The e4m3 value nearest to x, ties to even; 448 past it.
inline double round_to_e4m3(double x) {
  if (x == 0 || std::isnan(x)) return x;
  int exponent = 0;
  std::frexp(x, &exponent);  // |x| in [2^(exponent - 1), 2^exponent)
  const double unit = std::ldexp(1.0, std::max(exponent - 1, -6) - 3);
  return std::clamp(std::nearbyint(x / unit) * unit, -448.0, 448.0);
}

// Rounds the values of a row, each 128 of them with one scale.
template <class Real>
void round_to_fp8(Real* values, size_t count, bool float_scales) {
  constexpr size_t kBlock = 128;
  for (size_t first = 0; first < count; first += kBlock) {
    const size_t end = std::min(count, first + kBlock);
    double amax = 0;
    for (size_t i = first; i < end; ++i)
      amax = std::max(amax, std::fabs(static_cast<double>(values[i])));
    if (amax == 0) continue;
    double factor = static_cast<double>(448.0f / static_cast<float>(amax));
    if (!float_scales) factor = std::exp2(std::floor(std::log2(factor)));
    const double scale = static_cast<double>(1.0f / static_cast<float>(factor));
    for (size_t i = first; i < end; ++i)
      values[i] = static_cast<Real>(round_to_e4m3(static_cast<double>(values[i]) * factor) * scale);
  }
}

}  // namespace tilemoe::verify
