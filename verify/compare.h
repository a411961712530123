// How far a tensor is from the truth, and how far it may be.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

#include "case.h"

namespace tilemoe::verify {

struct Figures {
  double frobenius = 0;  // |got - truth| / |truth|
  // The largest of |got - truth| / |truth| over rows; a row whose norm is below `smallest` times
  // the rms of the rows' norms is judged by that norm instead of its own.
  double worst_row = 0;
  int64_t worst_row_index = -1;
  int64_t first_nan = -1;  // element; where there is one, both errors are NaN
};

// Rows of `width` elements; the last may be shorter. Both arrays have the same size.
template <class Element>
Figures measure(const std::vector<Element>& got, const std::vector<double>& truth, int64_t width,
                double smallest);

// 1e-2; 0.1 in float32, where a row of a few sums that nearly cancel is off by far more than 1e-5
// of itself in any pipeline.
double small_row(DType dtype);

struct Limit {
  double frobenius, worst_row;
};

// Both errors are at most the limit's; NaN never is.
bool within(const Figures& figures, const Limit& limit);

// For integer cases: equal, bit for bit but for the sign of zero.
constexpr Limit kEqual{.frobenius = 0, .worst_row = 0};

// What a plain evaluation in the case's own precision leaves room for. 16-bit types: 1.05 times
// (worst row 1.25 times) the error of float64 that rounds where the library stores. float32: twice
// the error of a plain float32 pipeline and at most 2e-6; for the worst row, and for tensors of so
// few elements that luck decides which pipeline is nearer, twice that error or 1e-5.
Limit limit_for(DType dtype, const Figures& plain, size_t elements);

// "frobenius 3.1e-03 (limit 3.2e-03), worst row 4.0e-03 at 17 (limit 4.9e-03)"
std::string describe(const Figures& figures, const Limit& limit);

}  // namespace tilemoe::verify
