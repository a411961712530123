// Low-rank adapters against the layer without them: with B = 0 its bits, and otherwise what merged
// weights and their gradients give.
#include <cmath>

#include "layer_support.h"

namespace tilemoe::verify {
namespace {

Computed run(const Inputs& inputs) {
  Problem problem(inputs);
  problem.run();
  EXPECT_EQ(problem.damage(), std::vector<std::string>());
  return problem.computed();
}

// The same layer without adapters.
Inputs bare(Inputs inputs) {
  inputs.test_case.lora = {};
  inputs.lora = inputs.dlora_before = {};
  return inputs;
}

class LayerLora : public testing::TestWithParam<Case> {};

TEST_P(LayerLora, BOfZerosGivesTheSame) {
  Inputs inputs = make_inputs(GetParam(), 3);
  for (auto* B : {&inputs.lora.B1, &inputs.lora.B2}) std::fill(B->begin(), B->end(), 0.f);
  const Computed with = run(inputs), without = run(bare(inputs));
  for (const Output output : {kH, kO, kDX, kDs, kDW1, kDW2, kDb1, kDb2})
    EXPECT_EQ(first_difference(with[output], without[output]), -1) << output_name(output);
  // Q1 and Q2 are zero, P1 and P2 are not.
  const auto is_zero = [](float value) { return value == 0; };
  for (const Output output : {kDA1, kDA2})
    EXPECT_TRUE(std::all_of(with[output].begin(), with[output].end(), is_zero));
  for (const Output output : {kDB1, kDB2})
    EXPECT_EQ(std::all_of(with[output].begin(), with[output].end(), is_zero), with[output].empty());
}

std::vector<Case> bit_cases() {
  return named_cases({"lora", "lora-W1-only", "lora-W2-only", "lora-plain", "lora-interleaved",
                      "lora-split", "lora-up-only-transposed", "lora-transposed",
                      "lora-column-blocks", "lora-two-calls", "lora-parts", "lora-grouped"},
                     {"float32", "bfloat16", "float16"});
}

std::vector<Case> zero_cases() {
  std::vector<Case> cases = bit_cases();
  for (Case& one : cases) {
    one.wanted = {};
    one.accumulate_dW = false;
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, LayerLora, testing::ValuesIn(zero_cases()), test_name);

// ------------------------------------------------- merged weights

// The matrices of all experts, dense.
struct Matrices {
  int64_t E, rows, columns;
  std::vector<double> values;

  double at(int64_t e, int64_t row, int64_t column) const {
    return values[static_cast<size_t>((e * rows + row) * columns + column)];
  }
};

Matrices matrices(const std::vector<float>& values, int64_t E, int64_t rows, int64_t columns) {
  EXPECT_EQ(static_cast<int64_t>(values.size()), E * rows * columns);
  return {E, rows, columns, {values.begin(), values.end()}};
}

// scale op(a) op(b) of each expert.
std::vector<double> product(double scale, const Matrices& a, bool transpose_a, const Matrices& b,
                            bool transpose_b) {
  const int64_t rows = transpose_a ? a.columns : a.rows, inner = transpose_a ? a.rows : a.columns;
  const int64_t columns = transpose_b ? b.rows : b.columns;
  std::vector<double> result;
  result.reserve(static_cast<size_t>(a.E * rows * columns));
  for (int64_t e = 0; e < a.E; ++e)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j) {
        double sum = 0;
        for (int64_t k = 0; k < inner; ++k)
          sum += (transpose_a ? a.at(e, k, i) : a.at(e, i, k)) *
                 (transpose_b ? b.at(e, j, k) : b.at(e, k, j));
        result.push_back(scale * sum);
      }
  return result;
}

void add(std::vector<float>& weights, const std::vector<double>& update) {
  ASSERT_EQ(weights.size(), update.size());
  for (size_t i = 0; i < weights.size(); ++i)
    weights[i] = static_cast<float>(double{weights[i]} + update[i]);
}

template <class Value>
void expect_near(const std::vector<float>& got, const std::vector<Value>& expected,
                 const char* name) {
  ASSERT_EQ(got.size(), expected.size()) << name;
  double error = 0, norm = 0;
  for (size_t i = 0; i < got.size(); ++i) {
    error += std::pow(double{got[i]} - static_cast<double>(expected[i]), 2);
    norm += std::pow(static_cast<double>(expected[i]), 2);
  }
  EXPECT_TRUE(norm > 0) << name;
  EXPECT_TRUE(std::sqrt(error) <= 2e-6 * std::sqrt(norm))
      << name << ": " << std::sqrt(error / norm);
}

class LoraMerged : public testing::TestWithParam<Case> {};

// W + scale B A, whose gradient dW gives dA = scale B^T dW and dB = scale dW A^T.
TEST_P(LoraMerged, GivesTheSame) {
  const Inputs inputs = make_inputs(GetParam(), 3);
  const Case& one = inputs.test_case;
  const Adapters& lora = one.lora;
  const int64_t E = one.E, d = one.d, n = one.n, h = one.h_width();
  const Matrices A1 = matrices(inputs.lora.A1, E, lora.rank_1(), d);
  const Matrices B1 = matrices(inputs.lora.B1, E, h, lora.rank_1());
  const Matrices A2 = matrices(inputs.lora.A2, E, lora.rank_2(), n);
  const Matrices B2 = matrices(inputs.lora.B2, E, d, lora.rank_2());
  Inputs merged = bare(inputs);
  add(merged.weights.W1, product(double{lora.scale_1}, B1, false, A1, false));
  add(merged.weights.W2, product(double{lora.scale_2}, B2, false, A2, false));

  const Computed got = run(inputs), expected = run(merged);
  for (const Output output : {kH, kO, kDX, kDs, kDW1, kDW2})
    expect_near(got[output], expected[output], output_name(output));
  const Matrices dW1 = matrices(expected[kDW1], E, h, d), dW2 = matrices(expected[kDW2], E, d, n);
  if (lora.rank_1() > 0) {
    expect_near(got[kDA1], product(double{lora.scale_1}, B1, true, dW1, false), "dA1");
    std::vector<double> dB1 = product(double{lora.scale_1}, dW1, false, A1, true);
    for (size_t i = 0; i < dB1.size(); ++i) {
      const auto place = static_cast<int64_t>(i);
      if (!has_factor(one, place / lora.rank_1() % h, place % lora.rank_1())) dB1[i] = 0;
    }
    expect_near(got[kDB1], dB1, "dB1");
  }
  if (lora.rank_2() > 0) {
    expect_near(got[kDA2], product(double{lora.scale_2}, B2, true, dW2, false), "dA2");
    expect_near(got[kDB2], product(double{lora.scale_2}, dW2, false, A2, true), "dB2");
  }
}

std::vector<Case> merged_cases() {
  std::vector<Case> cases =
      named_cases({"lora", "lora-W1-only", "lora-W2-only", "lora-plain", "lora-plain-transposed",
                   "lora-transposed", "lora-interleaved", "lora-interleaved-transposed",
                   "lora-split", "lora-split-gate-only", "lora-up-only-transposed",
                   "lora-split-transposed", "lora-column-blocks", "lora-general", "lora-grouped"},
                  {"float32"});
  for (Case& one : cases) {
    one.wanted = {};
    one.accumulate_dW = false;
  }
  return cases;
}

INSTANTIATE_TEST_SUITE_P(, LoraMerged, testing::ValuesIn(merged_cases()), test_name);

// ------------------------------------------------- memory

TEST(LayerLoraMemory, SavesP1AndP2) {
  for (const Case& one : bit_cases()) {
    const RoutingSpec spec =
        one.spec(one.routing == RoutingKind::kGeneral ? one.T * one.K : 0, Device::kCpu);
    const Experts with = one.experts(Device::kCpu);
    Experts without = with;
    without.rank_1 = without.rank_2 = 0;
    const tilemoe_saved_size size = with.saved_bytes(spec), before = without.saved_bytes(spec);
    const size_t row_bytes = static_cast<size_t>(spec.bound()) * size_of(one.dtype);
    EXPECT_EQ(size.P1, row_bytes * static_cast<size_t>(with.rank_1)) << one.name;
    EXPECT_EQ(size.P2, row_bytes * static_cast<size_t>(with.rank_2)) << one.name;
    EXPECT_EQ(size.total, before.total + size.P1 + size.P2) << one.name;
    EXPECT_EQ(before.P1 + before.P2, 0u);

    // Each of them begins on its own 256 bytes in a workspace.
    constexpr size_t kRounding = 512;
    const auto forward = with.workspace_bytes(spec, Pass::kForward);
    const auto inference = with.workspace_bytes(spec, Pass::kInference);
    EXPECT_GE(inference, forward + size.P1 + size.P2) << one.name;
    EXPECT_LE(inference, forward + size.P1 + size.P2 + kRounding) << one.name;

    const auto factor = [&](int64_t rows, int64_t columns) {
      const size_t dense = static_cast<size_t>(one.E * rows * columns) * size_of(one.dtype);
      return (dense + 255) / 256 * 256;
    };
    EXPECT_EQ(with.packed_lora_bytes(), factor(with.rank_1, one.d) +
                                            factor(with.rank_1, one.h_width()) +
                                            factor(with.rank_2, one.n) + factor(with.rank_2, one.d))
        << one.name;
  }
}

// Any subset of the gradients needs at most the workspace of more of them.
TEST(LayerLoraMemory, WorkspaceOfParts) {
  const Case one = named_case("lora/bfloat16");
  const RoutingSpec spec = one.spec(0, Device::kCpu);
  const Experts experts = one.experts(Device::kCpu);
  const auto bytes = [&](BackwardMode mode, uint32_t gradients) {
    return experts.workspace_bytes(spec, mode, gradients);
  };
  for (const BackwardMode mode : {BackwardMode::kWhole, BackwardMode::kOverH, BackwardMode::kFirst})
    for (uint32_t some = 1; some < 1024; ++some) {
      EXPECT_LE(bytes(mode, some), bytes(mode, 0)) << some;
      for (const uint32_t bit : {uint32_t{TILEMOE_GRADIENT_X}, uint32_t{TILEMOE_GRADIENT_LORA_1},
                                 uint32_t{TILEMOE_GRADIENT_LORA_2}})
        EXPECT_LE(bytes(mode, some), bytes(mode, some | bit)) << some << " " << bit;
    }
}

}  // namespace
}  // namespace tilemoe::verify
