#include "spoil.h"

#include <algorithm>
#include <cmath>
#include <map>
#include <numeric>

namespace tilemoe::verify {
namespace {

// A pair matters if its score is at least this part of its token's largest.
constexpr double kMinPart = 0.1;

std::optional<int64_t> smallest_expert_that_matters(const std::vector<Pair>& pairs) {
  std::map<int64_t, double> largest;     // score by token
  std::map<int64_t, int64_t> row_count;  // by expert
  for (const Pair& pair : pairs) {
    largest[pair.token] = std::max(largest[pair.token], std::fabs(pair.score));
    ++row_count[pair.expert];
  }
  std::optional<int64_t> smallest;
  for (const Pair& pair : pairs) {
    if (pair.score == 0 || std::fabs(pair.score) < kMinPart * largest[pair.token]) continue;
    if (!smallest || row_count[pair.expert] < row_count[*smallest]) smallest = pair.expert;
  }
  return smallest;
}

}  // namespace

const char* spoiling_name(Spoiling spoiling) {
  switch (spoiling) {
    case Spoiling::kZeroed: return "zeroed";
    case Spoiling::kTwoRowsSwapped: return "two rows swapped";
    case Spoiling::kExpertDropped: return "one expert dropped";
  }
  return "?";
}

Spoiler::Spoiler(const Inputs& inputs, const std::vector<Pair>& pairs, const Results& truth)
    : case_(inputs.test_case), has_pairs_(!pairs.empty()), truth_(truth) {
  const std::optional<int64_t> expert = smallest_expert_that_matters(pairs);
  if (!expert) return;
  std::vector<Pair> its_pairs = pairs;
  std::erase_if(its_pairs, [&](const Pair& pair) { return pair.expert != *expert; });
  Inputs bare = inputs;  // without the addends, which no expert contributes to
  bare.O_addend.clear(), bare.dX_addend.clear();
  bare.dW_before = {};
  contribution_ = evaluate(bare, its_pairs, Precision::kExact);
}

std::ptrdiff_t Spoiler::row_size(Output output) const {
  return static_cast<std::ptrdiff_t>(output == kDs ? 1 : row_width(case_, output));
}

bool Spoiler::applies(Spoiling spoiling, Output output) const {
  const std::vector<double>& truth = truth_[output];
  const auto is_zero = [](double value) { return value == 0; };
  if (std::all_of(truth.begin(), truth.end(), is_zero)) return false;
  const std::ptrdiff_t width = row_size(output);
  switch (spoiling) {
    case Spoiling::kZeroed: return true;
    case Spoiling::kTwoRowsSwapped:  // every row is the one before it
      return !std::equal(truth.begin() + width, truth.end(), truth.begin());
    case Spoiling::kExpertDropped: return has_pairs_;
  }
  return true;
}

std::optional<std::vector<float>> Spoiler::spoil(Spoiling spoiling, Output output,
                                                 const std::vector<float>& values) const {
  if (std::all_of(values.begin(), values.end(), [](float value) { return value == 0; }))
    return std::nullopt;
  switch (spoiling) {
    case Spoiling::kZeroed: return std::vector<float>(values.size());
    case Spoiling::kTwoRowsSwapped: return swap_rows(output, values);
    case Spoiling::kExpertDropped: return drop_expert(output, values);
  }
  return std::nullopt;
}

// Swaps the first two rows that differ and are not small, or a row that is not small with any that
// differs; in ds two pairs.
std::optional<std::vector<float>> Spoiler::swap_rows(Output output,
                                                     std::vector<float> values) const {
  const std::ptrdiff_t width = row_size(output);
  const auto rows = static_cast<std::ptrdiff_t>(values.size()) / width;
  const auto begin = [&](std::ptrdiff_t row) { return values.begin() + row * width; };
  const auto square = [](double sum, float value) { return sum + double{value} * value; };
  const double mean_square =
      std::accumulate(values.begin(), values.end(), 0.0, square) / static_cast<double>(rows);
  const auto is_small = [&](std::ptrdiff_t row) {
    return std::accumulate(begin(row), begin(row + 1), 0.0, square) < 0.01 * mean_square;
  };
  std::ptrdiff_t first = 0;
  while (first < rows && is_small(first)) ++first;
  if (first == rows) return std::nullopt;
  std::ptrdiff_t second = -1;
  for (std::ptrdiff_t row = 0; row < rows; ++row) {
    if (std::equal(begin(first), begin(first + 1), begin(row))) continue;
    second = row;
    if (!is_small(row)) break;
  }
  if (second < 0) return std::nullopt;
  std::swap_ranges(begin(first), begin(first + 1), begin(second));
  return values;
}

std::optional<std::vector<float>> Spoiler::drop_expert(Output output,
                                                       std::vector<float> values) const {
  if (!contribution_) return std::nullopt;
  const std::vector<double>& part = (*contribution_)[output];
  if (std::all_of(part.begin(), part.end(), [](double value) { return value == 0; }))
    return std::nullopt;
  for (size_t i = 0; i < part.size(); ++i) values[i] -= static_cast<float>(part[i]);
  return values;
}

}  // namespace tilemoe::verify
