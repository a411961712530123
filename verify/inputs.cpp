#include "inputs.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "number.h"
#include "random.h"
#include "weights.h"

namespace tilemoe::verify {
namespace {

// One sequence of random numbers each, so that no tensor's size changes another's values.
enum Stream : uint64_t {
  kX,
  kDO,
  kOAddend,
  kDXAddend,
  kW1,
  kW2,
  kB1,
  kB2,
  kDW1,
  kDW2,
  kDb1,
  kDb2,
  kLogits,
  kScores,
  kTriples,
  kBadIds,
  kA1,
  kB1Factor,
  kA2,
  kB2Factor,
  kDA1,
  kDB1Factor,
  kDA2,
  kDB2Factor,
  kQuantizedW1,
  kQuantizedW1Up,
  kQuantizedW2
};

// The values of a tensor: normal, or whole numbers, one in `sparsity` of them drawn, the rest 0.
struct Distribution {
  double deviation;
  int64_t largest_integer;
  int64_t sparsity = 1;
};

class Generator {
 public:
  Generator(const Case& test_case, uint64_t seed) : case_(test_case), seed_(seed) {}

  std::vector<float> tensor(Stream stream, int64_t count, DType dtype,
                            Distribution distribution) const {
    Random random(seed_, stream);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(draw(random, dtype, distribution));
    return values;
  }

  // (outer_rows, d), NaN past the last row that is given.
  std::vector<float> rows(Stream stream, Distribution distribution) const {
    std::vector<float> values =
        tensor(stream, case_.outer_rows() * case_.d, case_.dtype, distribution);
    const auto spare = static_cast<std::ptrdiff_t>(case_.spare_rows * case_.d);
    std::fill(values.end() - spare, values.end(), std::numeric_limits<float>::quiet_NaN());
    return values;
  }

  ExpertValues experts(DType dtype, double W1, double W2, double bias,
                       std::initializer_list<Stream> streams) const {
    const Stream* stream = streams.begin();
    const int64_t E = case_.E, d = case_.d, n = case_.n, h = case_.h_width();
    // About 20 weights of a row are not zero, which keeps sums small.
    const auto weight = [](double deviation, int64_t fan_in) -> Distribution {
      return {.deviation = deviation,
              .largest_integer = 1,
              .sparsity = std::max<int64_t>(1, fan_in / 32)};
    };
    ExpertValues values{.W1 = tensor(stream[0], E * h * d, dtype, weight(W1, d)),
                        .W2 = tensor(stream[1], E * d * n, dtype, weight(W2, n)),
                        .b1 = {},
                        .b2 = {}};
    if (!case_.biases) return values;
    values.b1 = tensor(stream[2], E * h, dtype, {.deviation = bias, .largest_integer = 2});
    values.b2 = tensor(stream[3], E * d, dtype, {.deviation = bias, .largest_integer = 2});
    return values;
  }

  // Replaces the weights that are quantised, and returns their arrays.
  QuantizedValues quantize(ExpertValues& weights, double W1, double W2) const {
    const int64_t d = case_.d, n = case_.n, h = case_.h_width();
    QuantizedValues quantized;
    if (case_.format_1 != Format::kNone) {
      const bool split = case_.gate_layout == GateLayout::kSplit;
      const int64_t rows = split ? n : h;
      quantized.W1 = arrays(kQuantizedW1, case_.format_1, rows, d, case_.W1_transposed, W1);
      if (split)
        quantized.W1_up = arrays(kQuantizedW1Up, case_.format_1, n, d, case_.W1_transposed, W1);
      const std::vector<float> main = rounded(quantized.W1, case_.W1_transposed);
      const std::vector<float> up =
          split ? rounded(quantized.W1_up, case_.W1_transposed) : std::vector<float>();
      for (int64_t e = 0; e < case_.E; ++e)
        for (int64_t row = 0; row < h; ++row) {
          const RowPlace place = place_of(case_, row);
          const std::vector<float>& from = place.in_up ? up : main;
          std::copy_n(from.begin() + (e * rows + place.row) * d, d,
                      weights.W1.begin() + (e * h + row) * d);
        }
    }
    if (case_.format_2 != Format::kNone) {
      quantized.W2 = arrays(kQuantizedW2, case_.format_2, d, n, case_.W2_transposed, W2);
      weights.W2 = rounded(quantized.W2, case_.W2_transposed);
    }
    return quantized;
  }

  // `scale`: of the deviations that keep P, and P times B, as large as the rows they come from.
  LoraValues factors(DType dtype, double scale, std::initializer_list<Stream> streams) const {
    const Stream* stream = streams.begin();
    const int64_t E = case_.E, d = case_.d, n = case_.n, h = case_.h_width();
    const int64_t rank_1 = case_.lora.rank_1(), rank_2 = case_.lora.rank_2();
    // A few of a row are not zero, which keeps sums small.
    const auto make = [&](Stream of, int64_t rows, int64_t columns, int64_t kept) {
      const double fan_in = static_cast<double>(std::max<int64_t>(columns, 1));
      return tensor(of, E * rows * columns, dtype,
                    {.deviation = scale / std::sqrt(fan_in),
                     .largest_integer = 1,
                     .sparsity = std::max<int64_t>(1, columns / kept)});
    };
    LoraValues values{.A1 = make(stream[0], rank_1, d, 3),
                      .B1 = make(stream[1], h, rank_1, 1),
                      .A2 = make(stream[2], rank_2, n, 3),
                      .B2 = make(stream[3], d, rank_2, 1)};
    for (size_t i = 0; i < values.B1.size(); ++i) {
      const auto row = static_cast<int64_t>(i) / rank_1, column = static_cast<int64_t>(i) % rank_1;
      if (!has_factor(case_, row % h, column)) values.B1[i] = 0;
    }
    return values;
  }

  // (T, E): random, plus what makes the case's load.
  std::vector<float> logits(double deviation) const {
    Random random(seed_, kLogits);
    std::vector<float> values(static_cast<size_t>(case_.T * case_.E));
    size_t i = 0;
    for (int64_t t = 0; t < case_.T; ++t)
      for (int64_t e = 0; e < case_.E; ++e)
        values[i++] = static_cast<float>(deviation * random.normal() + popularity(e));
    return values;
  }

  std::vector<float> scores(int64_t count) const {
    Random random(seed_, kScores);
    std::vector<float> values(static_cast<size_t>(count));
    for (float& value : values) value = static_cast<float>(draw_score(random));
    return values;
  }

  std::vector<int64_t> bad_pairs(int64_t pairs) const {
    Random random(seed_, kBadIds);
    std::vector<int64_t> chosen;
    for (int64_t pair = 0; pair < pairs; ++pair)
      if (random.below(8) == 0) chosen.push_back(pair);
    return chosen;
  }

  // Tokens in ascending order with 0 to 2K pairs each, some repeated.
  void triples(Inputs& inputs) const {
    Random random(seed_, kTriples);
    for (int64_t t = 0; t < case_.T; ++t)
      for (int64_t left = random.below(2 * case_.K + 1); left > 0; --left) {
        inputs.tokens.push_back(t);
        inputs.experts.push_back(draw_expert(random));
      }
    inputs.scores = scores(inputs.pairs());
  }

 private:
  // The arrays of a weight (E, rows, columns).
  QuantizedArrays arrays(Stream stream, Format format, int64_t rows, int64_t columns,
                         bool transposed, double deviation) const {
    Random random(seed_, stream);
    const int64_t R = transposed ? columns : rows, C = transposed ? rows : columns;
    if (case_.data != Data::kIntegers) {
      QuantizedArrays made = random_arrays(format, case_.E, R, C, deviation, random);
      // The values are exact in 16 bits, as those that the recipe computes with.
      if (case_.recipe != Recipe::kBf16)
        for (float& scale : made.float_scales) scale = std::exp2(std::floor(std::log2(scale)));
      return made;
    }
    return whole_arrays(format, case_.E, R, C, std::max<int64_t>(1, columns / 32), random);
  }

  // The values (E, rows, columns) in the case's dtype.
  std::vector<float> rounded(const QuantizedArrays& arrays, bool transposed) const {
    const std::vector<float> stored = values_of(arrays);
    std::vector<float> values(stored.size());
    const int64_t R = arrays.R, C = arrays.C;
    for (int64_t i = 0; i < static_cast<int64_t>(stored.size()); ++i) {
      const int64_t e = i / (R * C), row = i / C % R, column = i % C;
      const int64_t to = transposed ? (e * C + column) * R + row : i;
      values[static_cast<size_t>(to)] =
          static_cast<float>(round_to(case_.dtype, double{stored[static_cast<size_t>(i)]}));
    }
    return values;
  }

  double draw(Random& random, DType dtype, Distribution distribution) const {
    if (case_.data != Data::kIntegers)
      return round_to(dtype, distribution.deviation * random.normal());
    const int64_t largest = distribution.largest_integer;
    if (random.below(distribution.sparsity) != 0) return 0;
    return static_cast<double>(random.below(2 * largest + 1) - largest);
  }

  double draw_score(Random& random) const {
    constexpr double kExact[] = {-1, 0, 0.5, 1, 2};
    if (case_.data == Data::kIntegers) return kExact[random.below(std::size(kExact))];
    return round_to(case_.score_dtype, 1.25 * random.uniform() - 0.25);
  }

  // Added to the logits of expert e.
  double popularity(int64_t e) const {
    constexpr double kCertain = 30;
    switch (case_.load) {
      case Load::kRandom: return 0;
      case Load::kZipf: return -2 * std::log(static_cast<double>(e + 1));
      case Load::kOneExpert: return e == case_.E / 2 ? kCertain : 0;
      case Load::kHalfEmpty: return e % 2 ? -kCertain : 0;
    }
    return 0;
  }

  // The largest of noisy popularities, as top-1 of such logits would choose.
  int64_t draw_expert(Random& random) const {
    if (case_.bad_ids && random.below(8) == 0) return random.below(2) ? -1 : case_.E;
    if (case_.load == Load::kRandom) return random.below(case_.E);
    int64_t best = 0;
    double best_value = -std::numeric_limits<double>::infinity();
    for (int64_t e = 0; e < case_.E; ++e) {
      const double value = random.normal() + popularity(e);
      if (value > best_value) best = e, best_value = value;
    }
    return best;
  }

  const Case& case_;
  uint64_t seed_;
};

}  // namespace

bool has_factor(const Case& test_case, int64_t row, int64_t column) {
  if (test_case.gate_layout != GateLayout::kSplit) return true;
  return (row < test_case.n) == (column < test_case.lora.gate);
}

int64_t Inputs::pairs() const {
  if (test_case.routing == RoutingKind::kTopK) return test_case.T * test_case.K;
  if (test_case.routing == RoutingKind::kGeneral) return static_cast<int64_t>(tokens.size());
  return test_case.spec(0, Device::kCpu).bound();
}

Inputs make_inputs(const Case& test_case, uint64_t seed) {
  const Generator make(test_case, seed);
  const bool bench = test_case.data == Data::kBench;
  const auto fan_in = [](int64_t width) { return 1 / std::sqrt(static_cast<double>(width)); };

  Inputs inputs;
  inputs.test_case = test_case;
  inputs.X = make.rows(kX, {.deviation = bench ? 0.2 : 1, .largest_integer = 2});
  inputs.dO = make.rows(kDO, {.deviation = 1, .largest_integer = 1});
  if (test_case.addend) {
    inputs.O_addend = make.rows(kOAddend, {.deviation = 1, .largest_integer = 2});
    inputs.dX_addend = make.rows(kDXAddend, {.deviation = 1, .largest_integer = 2});
  }
  const double W1 = bench ? 0.02 : fan_in(test_case.d), W2 = bench ? 0.02 : fan_in(test_case.n);
  inputs.weights = make.experts(test_case.dtype, W1, W2, 0.5, {kW1, kW2, kB1, kB2});
  inputs.quantized = make.quantize(inputs.weights, W1, W2);
  if (test_case.accumulate_dW)
    inputs.dW_before = make.experts(test_case.dW_dtype(), 1, 1, 1, {kDW1, kDW2, kDb1, kDb2});
  if (test_case.lora.any()) {
    inputs.lora = make.factors(test_case.factor_dtype(), 1, {kA1, kB1Factor, kA2, kB2Factor});
    if (test_case.accumulate_dW)
      inputs.dlora_before =
          make.factors(test_case.dW_dtype(), 5, {kDA1, kDB1Factor, kDA2, kDB2Factor});
  }

  switch (test_case.routing) {
    case RoutingKind::kTopK:
      inputs.logits = make.logits(bench ? 0.2 : 1);
      if (test_case.data == Data::kIntegers) inputs.scores = make.scores(inputs.pairs());
      if (test_case.bad_ids) inputs.bad_pairs = make.bad_pairs(inputs.pairs());
      break;
    case RoutingKind::kRounded: inputs.logits = make.logits(bench ? 0.2 : 1); break;
    case RoutingKind::kGeneral: make.triples(inputs); break;
    case RoutingKind::kGrouped:
      if (test_case.row_scores) {
        inputs.scores = make.scores(inputs.pairs());
        std::fill(inputs.scores.end() - static_cast<std::ptrdiff_t>(test_case.spare_rows),
                  inputs.scores.end(), std::numeric_limits<float>::quiet_NaN());
      }
      break;
  }
  return inputs;
}

}  // namespace tilemoe::verify
