// Medians of repeated measurements.
#pragma once

#include <algorithm>
#include <utility>
#include <vector>

namespace tilemoe::app {

// 0 of nothing.
inline double median(std::vector<double> values) {
  if (values.empty()) return 0;
  std::sort(values.begin(), values.end());
  const size_t middle = values.size() / 2;
  return values.size() % 2 ? values[middle] : (values[middle - 1] + values[middle]) / 2;
}

// The median over the rounds of a number of each.
template <class Rounds, class Number>
double median_of(const Rounds& rounds, Number&& number) {
  std::vector<double> values;
  for (const auto& round : rounds) values.push_back(number(round));
  return median(std::move(values));
}

}  // namespace tilemoe::app
