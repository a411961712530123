#include "compare.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <limits>

namespace tilemoe::verify {
namespace {

// error / norm; 0 for a tensor of zeros without error.
double relative(double error, double norm) {
  if (error == 0) return 0;
  return norm > 0 ? error / norm : std::numeric_limits<double>::infinity();
}

}  // namespace

template <class Element>
Figures measure(const std::vector<Element>& got, const std::vector<double>& truth, int64_t width,
                double smallest) {
  Figures figures;
  const size_t size = truth.size(), row_size = static_cast<size_t>(width);
  const size_t rows = (size + row_size - 1) / row_size;
  std::vector<double> error(rows), norm(rows);  // squared
  double total_error = 0, total_norm = 0;
  for (size_t row = 0; row < rows; ++row) {
    for (size_t i = row * row_size; i < std::min(size, (row + 1) * row_size); ++i) {
      const double value = static_cast<double>(got[i]);
      if (std::isnan(value) && figures.first_nan < 0) figures.first_nan = static_cast<int64_t>(i);
      // equal infinities have no difference
      const double difference = value == truth[i] ? 0 : value - truth[i];
      error[row] += difference * difference;
      norm[row] += truth[i] * truth[i];
    }
    total_error += error[row], total_norm += norm[row];
  }
  figures.frobenius = relative(std::sqrt(total_error), std::sqrt(total_norm));
  const double floor =
      smallest * std::sqrt(total_norm / static_cast<double>(std::max<size_t>(rows, 1)));
  for (size_t row = 0; row < rows; ++row) {
    const double value = relative(std::sqrt(error[row]), std::max(std::sqrt(norm[row]), floor));
    if (value <= figures.worst_row) continue;
    figures.worst_row = value;
    figures.worst_row_index = static_cast<int64_t>(row);
    if (std::isnan(value)) break;
  }
  return figures;
}

template Figures measure(const std::vector<float>&, const std::vector<double>&, int64_t, double);
template Figures measure(const std::vector<double>&, const std::vector<double>&, int64_t, double);

bool within(const Figures& figures, const Limit& limit) {
  return figures.frobenius <= limit.frobenius && figures.worst_row <= limit.worst_row;
}

Figures worse(const Figures& a, const Figures& b) {
  Figures both = a.worst_row < b.worst_row ? b : a;
  both.frobenius = std::max(a.frobenius, b.frobenius);
  return both;
}

Limit limit_for(const Figures& of_float32, const Figures& of_rounding) {
  return {.frobenius = std::max(2 * of_float32.frobenius, 1.05 * of_rounding.frobenius),
          .worst_row = std::max(2 * of_float32.worst_row, 1.25 * of_rounding.worst_row)};
}

std::string describe(const Figures& figures, const Limit& limit) {
  char text[160];
  std::snprintf(text, sizeof text,
                "frobenius %.3e (limit %.3e), worst row %.3e at %lld (limit %.3e)",
                figures.frobenius, limit.frobenius, figures.worst_row,
                static_cast<long long>(figures.worst_row_index), limit.worst_row);
  std::string result = text;
  if (figures.first_nan >= 0) result += ", NaN at element " + std::to_string(figures.first_nan);
  return result;
}

}  // namespace tilemoe::verify
