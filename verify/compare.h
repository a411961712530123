// How far a tensor is from the truth, and how far it may be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "case.h"

namespace tilemoe::verify {

struct Figures {
  double frobenius = 0;  // |got - truth| / |truth|
  // The largest of |got - truth| / |truth| over rows; a row of norm below 1e-2 of the rms of the
  // rows' norms is judged by that norm instead of its own.
  double worst_row = 0;
  int64_t worst_row_index = -1;
  int64_t first_nan = -1;  // element; where there is one, both errors are NaN
};

// Rows of `width` elements; the last may be shorter. Both arrays have the same size.
template <class Element>
Figures measure(const std::vector<Element>& got, const std::vector<double>& truth, int64_t width);

struct Limit {
  double frobenius, worst_row;
};

// Both errors are at most the limit's; NaN never is.
bool within(const Figures& figures, const Limit& limit);

// For integer cases: equal, bit for bit but for the sign of zero.
constexpr Limit kEqual{.frobenius = 0, .worst_row = 0};

// What a plain evaluation in the case's own precision is allowed to teach: 16-bit types may be 1.05
// times (worst row 1.25 times) as far off as float64 that rounds where the library stores; float32
// twice as far as a plain float32 pipeline, and never further than 2e-6 (worst row 1e-5).
Limit limit_for(DType dtype, const Figures& plain);

// "frobenius 3.1e-03 (limit 3.2e-03), worst row 4.0e-03 at 17 (limit 4.9e-03)"
std::string describe(const Figures& figures, const Limit& limit);

}  // namespace tilemoe::verify
