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

// Swaps the factors of two experts.
void swap_experts(std::vector<float>& factor, int64_t E, int64_t a, int64_t b) {
  const auto size = static_cast<std::ptrdiff_t>(factor.size()) / E;
  std::swap_ranges(factor.begin() + a * size, factor.begin() + (a + 1) * size,
                   factor.begin() + b * size);
}

// Swaps the first two columns of every row.
void swap_columns(std::vector<float>& factor, int64_t rank) {
  for (size_t row = 0; row < factor.size(); row += static_cast<size_t>(rank))
    std::swap(factor[row], factor[row + 1]);
}

bool of_adapters(Spoiling spoiling) {
  return spoiling == Spoiling::kAdaptersSwapped || spoiling == Spoiling::kScaleTwice ||
         spoiling == Spoiling::kRankSwapped;
}

std::vector<float> plus(std::vector<float> values, const std::vector<double>& difference) {
  for (size_t i = 0; i < difference.size(); ++i) values[i] += static_cast<float>(difference[i]);
  return values;
}

bool all_zero(const std::vector<double>& values) {
  return std::all_of(values.begin(), values.end(), [](double value) { return value == 0; });
}

}  // namespace

const char* spoiling_name(Spoiling spoiling) {
  switch (spoiling) {
    case Spoiling::kZeroed: return "zeroed";
    case Spoiling::kTwoRowsSwapped: return "two rows swapped";
    case Spoiling::kExpertDropped: return "one expert dropped";
    case Spoiling::kAdaptersSwapped: return "adapters of two experts swapped";
    case Spoiling::kScaleTwice: return "scale of adapters applied twice";
    case Spoiling::kRankSwapped: return "two columns of the rank swapped";
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
  bare.dlora_before = {};
  contribution_ = evaluate(bare, its_pairs, Precision::kExact);
  if (!case_.lora.any()) return;
  Inputs wrong = inputs;
  Adapters& lora = wrong.test_case.lora;
  lora.scale_1 *= lora.scale_1, lora.scale_2 *= lora.scale_2;
  scaled_twice_ = difference(wrong, pairs);
  wrong = inputs;
  for (auto* factor : {&wrong.lora.A1, &wrong.lora.B1, &wrong.lora.A2, &wrong.lora.B2})
    swap_experts(*factor, case_.E, *expert, (*expert + 1) % case_.E);
  swapped_ = difference(wrong, pairs);
  wrong = inputs;
  swap_columns(wrong.lora.B1, case_.lora.rank_1()),
      swap_columns(wrong.lora.B2, case_.lora.rank_2());
  rank_swapped_ = difference(wrong, pairs);
}

std::optional<Results> Spoiler::difference(const Inputs& wrong,
                                           const std::vector<Pair>& pairs) const {
  const Precision precision =
      case_.data == Data::kIntegers ? Precision::kRounded : Precision::kExact;  // as the truth's
  Results results = evaluate(wrong, pairs, precision);
  for (size_t output = 0; output < kOutputs; ++output)
    for (size_t i = 0; i < results[output].size(); ++i) results[output][i] -= truth_[output][i];
  return results;
}

const std::optional<Results>& Spoiler::difference_of(Spoiling spoiling) const {
  if (spoiling == Spoiling::kScaleTwice) return scaled_twice_;
  return spoiling == Spoiling::kRankSwapped ? rank_swapped_ : swapped_;
}

bool Spoiler::concerns(Spoiling spoiling, Output output) const {
  if (!of_adapters(spoiling)) return true;
  if (!difference_of(spoiling)) return false;
  return !all_zero((*difference_of(spoiling))[output]);
}

std::ptrdiff_t Spoiler::row_size(Output output) const {
  return static_cast<std::ptrdiff_t>(output == kDs ? 1 : row_width(case_, output));
}

bool Spoiler::applies(Spoiling spoiling, Output output) const {
  const std::vector<double>& truth = truth_[output];
  if (all_zero(truth)) return false;
  const std::ptrdiff_t width = row_size(output);
  switch (spoiling) {
    case Spoiling::kZeroed: return true;
    case Spoiling::kTwoRowsSwapped:  // every row is the one before it
      return !std::equal(truth.begin() + width, truth.end(), truth.begin());
    case Spoiling::kExpertDropped: return has_pairs_;
    case Spoiling::kAdaptersSwapped:
    case Spoiling::kScaleTwice:
    case Spoiling::kRankSwapped: return true;
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
    case Spoiling::kAdaptersSwapped:
    case Spoiling::kScaleTwice:
    case Spoiling::kRankSwapped: return plus(values, (*difference_of(spoiling))[output]);
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
  if (all_zero(part)) return std::nullopt;
  for (size_t i = 0; i < part.size(); ++i) values[i] -= static_cast<float>(part[i]);
  return values;
}

}  // namespace tilemoe::verify
