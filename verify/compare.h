// A tensor's error and its limit.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "case.h"

namespace tilemoe::verify {

struct Figures {
  double frobenius = 0;  // |got - truth| / |truth|
  // The largest of |got - truth| / |truth| over rows; a row whose norm is below `smallest` times
  // the rms of the rows' norms is compared with that norm instead of its own.
  double worst_row = 0;
  int64_t worst_row_index = -1;
  int64_t first_nan = -1;  // element; if there is a NaN, both errors are NaN
};

// Rows of `width` elements; the last may be shorter. Both arrays have the same size.
template <class Element>
Figures measure(const std::vector<Element>& got, const std::vector<double>& truth, int64_t width,
                double smallest);

// Below this part of the rms norm a row's sums cancelled, so that its own norm is no scale.
constexpr double kSmallRow = 1e-2;

struct Limit {
  double frobenius, worst_row;
};

// Both errors are at most the limit's; NaN never is.
bool within(const Figures& figures, const Limit& limit);

// For integer cases: equal, bit for bit but for the sign of zero.
constexpr Limit kEqual{.frobenius = 0, .worst_row = 0};

// The larger of each error.
Figures worse(const Figures& a, const Figures& b);

// The limit from the errors of plain evaluations: twice the error of an unfused float32 pipeline
// or, if a 16-bit type is stored on the way, 1.05 times (worst row 1.25 times) the error of a
// float64 one that rounds as the library stores, if that is more.
Limit limit_for(const Figures& of_float32, const Figures& of_rounding);

// "frobenius 3.1e-03 (limit 3.2e-03), worst row 4.0e-03 at 17 (limit 4.9e-03)"
std::string describe(const Figures& figures, const Limit& limit);

}  // namespace tilemoe::verify
