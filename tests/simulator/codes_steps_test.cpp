// The projections of forward that read quantised weights as their codes, on a simulated GPU: the bits
// of the same step with weights that were dequantised before, with NaN around every operand.
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "cuda/cuda_backend.h"
#include "cuda/kernels/kernels.h"
#include "cuda/plan.h"
#include "dequantize_support.h"
#include "lora_problem.h"

namespace tilemoe::test {
namespace {

struct Case {
  Format format = Format::kMxfp4;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  bool is_up = true;
  tilemoe_activation activation = TILEMOE_SWIGLU;
  tilemoe_gate_layout layout = TILEMOE_GATE_CONCATENATED;
  int64_t rank = 0;
  int64_t sum = 128;       // columns of the weight
  int64_t columns = 72;    // of A, or of the block of Y
  int64_t first_row = 0;   // of the block of Y
  int64_t rows_after = 0;  // of W2, past the block
  bool tiny_scales = false;
};

double fraction(const Index& index, int64_t salt) {
  return whole(index, salt, 100) * 0.0137;
}

class Problem {
 public:
  explicit Problem(const Case& c)
      : case_(c),
        rows_({37, 0, 3, 130, 1}, 5, 37),
        source_(PlacedTensor::columns(c.dtype, c.is_up ? rows_.T : rows_.capacity, c.sum,
                                      c.sum + 2 * kMargin, kMargin)),
        P_(PlacedTensor::columns(c.dtype, rows_.capacity, std::max<int64_t>(c.rank, 8),
                                 std::max<int64_t>(c.rank, 8) + 2 * kMargin, kMargin)),
        factor_(c.dtype, {rows_.E, factor_rows(), std::max<int64_t>(c.rank, 8)},
                {factor_rows() * std::max<int64_t>(c.rank, 8), std::max<int64_t>(c.rank, 8), 1}),
        bias_(c.dtype, {rows_.E, weight_rows()}, {weight_rows(), 1}),
        bias_up_(c.dtype, {rows_.E, weight_rows()}, {weight_rows(), 1}) {
    source_.fill([](const Index& i) { return fraction(i, 3); });
    P_.fill([&](const Index& i) { return i[0] < rows_.M ? fraction(i, 4) : NAN; });
    factor_.fill([](const Index& i) { return fraction(i, 5); });
    bias_.fill([](const Index& i) { return fraction(i, 6); });
    bias_up_.fill([](const Index& i) { return fraction(i, 7); });
    weights_.emplace_back(*this, 1);
    if (is_split()) weights_.emplace_back(*this, 2);
    experts_.struct_size = sizeof experts_;
    experts_.dtype = c.dtype, experts_.E = rows_.E;
    experts_.d = c.is_up ? c.sum : weight_rows(), experts_.n = c.is_up ? c.columns : c.sum;
    experts_.activation = c.activation, experts_.gate_layout = c.layout;
  }

  struct Outputs {
    PlacedTensor wide, A;
  };
  Outputs run(bool as_codes) {
    const int64_t width = case_.is_up ? (gated() ? 2 : 1) * case_.columns : case_.columns;
    Outputs out{{case_.dtype, {rows_.capacity, width}, {width, 1}},
                {case_.dtype, {rows_.capacity, case_.columns}, {case_.columns, 1}}};
    visit(out, as_codes, [&](const auto& step) {
      kernel_ = {cuda::key_of(step), *cuda::kernel_of(step)};
      start(cuda::kernel_of(step), step);
    });
    expect_clean_run();
    return out;
  }

  // Of the last run.
  const cuda::instances::Row& kernel() const { return kernel_; }

  void expect_same_bits() {
    const Outputs values = run(false), codes = run(true);
    EXPECT_EQ(bytes_of(values.wide), bytes_of(codes.wide));
    EXPECT_EQ(bytes_of(values.A), bytes_of(codes.A));
    if (case_.tiny_scales) return;
    const std::vector<uint8_t> bytes = bytes_of(codes.wide);
    EXPECT_NE(bytes, std::vector<uint8_t>(bytes.size(), bytes[0])) << "nothing was written";
  }

 private:
  // A quantised weight, and its values in 16 bits. Its arrays have no guards: the simulator finds a
  // read past their end.
  struct Weight {
    Weight(const Problem& of, uint64_t seed)
        : arrays(of.random_arrays(seed)),
          weight(verify::placed(
              arrays, false,
              [&](const char* /*field*/, const auto& numbers) { return place(numbers); })),
          values(of.case_.dtype, {arrays.E, arrays.R, arrays.C},
                 {arrays.R * arrays.C, arrays.C, 1}) {
      cuda::dequantize({.weight = quantized(), .first = 0, .out = values.tensor()});
      expect_clean_run();
    }
    tilemoe_quantized quantized() const { return weight; }
    template <class Number>
    const Number* place(const std::vector<Number>& numbers) {
      if (numbers.empty()) return nullptr;
      const size_t bytes = numbers.size() * sizeof(Number);
      void* device = nullptr;
      EXPECT_EQ(cudaMalloc(&device, bytes), cudaSuccess);
      EXPECT_EQ(cudaMemcpy(device, numbers.data(), bytes, cudaMemcpyHostToDevice), cudaSuccess);
      memory.emplace_back(device, cudaFree);
      return static_cast<const Number*>(device);
    }

    verify::QuantizedArrays arrays;
    std::vector<std::shared_ptr<void>> memory;
    Quantized weight;
    PlacedTensor values;
  };

  bool gated() const { return tilemoe_activation_gated(case_.activation) != 0; }
  bool is_split() const { return case_.is_up && gated() && case_.layout == TILEMOE_GATE_SPLIT; }
  int64_t weight_rows() const {
    if (!case_.is_up) return case_.first_row + case_.columns + case_.rows_after;
    return (gated() && !is_split() ? 2 : 1) * case_.columns;
  }
  int64_t factor_rows() const { return case_.is_up && gated() ? 2 * case_.columns : case_.columns; }
  verify::QuantizedArrays random_arrays(uint64_t seed) const {
    verify::Random random(seed, 1);
    verify::QuantizedArrays arrays =
        verify::random_arrays(case_.format, rows_.E, weight_rows(), case_.sum, 0.3, random);
    if (case_.tiny_scales) {
      for (size_t i = 0; i < arrays.byte_scales.size(); ++i)
        arrays.byte_scales[i] = static_cast<uint8_t>(i % 7);
      for (size_t i = 0; i < arrays.float_scales.size(); ++i)
        arrays.float_scales[i] = 1e-40f * static_cast<float>(i % 7);
    }
    return arrays;
  }

  template <class Visit>
  void visit(Outputs& out, bool as_codes, const Visit& run) {
    const Rows rows = rows_.rows(case_.is_up);
    Adapter adapter{};
    if (case_.rank > 0) adapter = {P_.tensor(), factor_.tensor()};
    WeightCodes codes{};
    if (as_codes) codes.weight = weights_[0].quantized();
    if (as_codes && is_split()) codes.up = weights_[1].quantized();
    codes.first_row = case_.first_row;
    const auto values = [&](const Weight& weight, int64_t first, int64_t count) {
      tilemoe_tensor tensor = rows_of(weight.values.tensor(), first, count, 1);
      if (as_codes) tensor.data = nullptr;
      return tensor;
    };
    if (case_.is_up) {
      UpWeights weights{values(weights_[0], 0, weight_rows()), {}, bias_.tensor(), {}};
      if (is_split()) weights.W1_up = values(weights_[1], 0, weight_rows());
      if (is_split()) weights.b1_up = bias_up_.tensor();
      run(UpProjection{.experts = &experts_,
                       .rows = rows,
                       .X = source_.tensor(),
                       .weights = weights,
                       .H = out.wide.tensor(),
                       .A = out.A.tensor(),
                       .scratch = {},
                       .stream = nullptr,
                       .adapter = adapter,
                       .codes = codes});
      return;
    }
    run(DownProjection{.experts = &experts_,
                       .rows = rows,
                       .A = source_.tensor(),
                       .W2 = values(weights_[0], case_.first_row, case_.columns),
                       .b2 = {},
                       .Y = out.wide.tensor(),
                       .scratch = {},
                       .stream = nullptr,
                       .adapter = adapter,
                       .codes = codes});
  }

  const Case case_;
  const ExpertRows rows_;
  PlacedTensor source_, P_, factor_, bias_, bias_up_;
  std::vector<Weight> weights_;
  tilemoe_experts experts_{};
  cuda::instances::Row kernel_{};
};

class CodesSteps : public testing::TestWithParam<Format> {
 protected:
  // Sizes that end within a k block if the format has such.
  int64_t short_sum() const {
    switch (GetParam()) {
      case Format::kFp8: return 144;
      case Format::kMxfp4:
      case Format::kNvfp4: return 160;
      default: return 192;
    }
  }
  static void expect_same_bits(const Case& c) {
    SCOPED_TRACE(std::string(c.is_up ? "up" : "down") + ", activation " +
                 std::to_string(c.activation) + ", layout " + std::to_string(c.layout) + ", rank " +
                 std::to_string(c.rank) + ", sum " + std::to_string(c.sum));
    simulate("sm80");
    Problem(c).expect_same_bits();
  }
};

TEST_P(CodesSteps, UpProjectionHasTheBitsOfValues) {
  for (const tilemoe_gate_layout layout :
       {TILEMOE_GATE_CONCATENATED, TILEMOE_GATE_INTERLEAVED, TILEMOE_GATE_SPLIT})
    expect_same_bits({.format = GetParam(), .layout = layout, .sum = short_sum()});
  expect_same_bits({.format = GetParam(), .dtype = TILEMOE_FLOAT16});
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    expect_same_bits({.format = GetParam(),
                      .dtype = dtype,
                      .activation = TILEMOE_RELU,
                      .sum = short_sum(),
                      .columns = 200});
}

TEST_P(CodesSteps, DownProjectionHasTheBitsOfValues) {
  expect_same_bits({.format = GetParam(), .is_up = false, .sum = short_sum(), .columns = 136});
  expect_same_bits({.format = GetParam(),
                    .dtype = TILEMOE_FLOAT16,
                    .is_up = false,
                    .sum = 64,
                    .columns = 96,
                    .first_row = 104,
                    .rows_after = 56});
}

TEST_P(CodesSteps, AdaptersFollowTheCodes) {
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16}) {
    expect_same_bits({.format = GetParam(), .dtype = dtype, .rank = 72, .sum = short_sum()});
    expect_same_bits(
        {.format = GetParam(), .dtype = dtype, .activation = TILEMOE_RELU, .rank = 8, .sum = 64});
    expect_same_bits({.format = GetParam(),
                      .dtype = dtype,
                      .is_up = false,
                      .rank = 16,
                      .sum = short_sum(),
                      .columns = 136});
  }
  expect_same_bits({.format = GetParam(), .layout = TILEMOE_GATE_SPLIT, .rank = 16});
}

// Scales whose products are subnormal.
TEST_P(CodesSteps, TinyScalesHaveTheBitsOfValues) {
  expect_same_bits({.format = GetParam(), .is_up = false, .tiny_scales = true});
  expect_same_bits(
      {.format = GetParam(), .dtype = TILEMOE_FLOAT16, .is_up = false, .tiny_scales = true});
}

INSTANTIATE_TEST_SUITE_P(, CodesSteps, testing::ValuesIn(verify::kFormats), verify::format_name);

// Each row of the table, by a case that is made of it.
TEST(CodesKernels, HaveTheBitsOfValues) {
  simulate("sm80");
  int rows = 0;
  for (const cuda::instances::Row& row : cuda::instances::kRows) {
    const cuda::Variant& variant = row.key.variant;
    if (!variant.codes || is_fp8(variant.recipe)) continue;
    SCOPED_TRACE("row " + std::to_string(++rows));
    Problem problem(
        {.format = Format::kNf4Double,
         .dtype = variant.recipe == cuda::RecipeName::kBF16 ? TILEMOE_BFLOAT16 : TILEMOE_FLOAT16,
         .is_up = row.key.gemm == cuda::GemmName::kUpProjection,
         .activation =
             variant.activations == cuda::Activations::kPlain ? TILEMOE_RELU : TILEMOE_REGLU,
         .rank = variant.adapter ? 24 : 0});
    problem.expect_same_bits();
    EXPECT_TRUE(problem.kernel().key == row.key && problem.kernel().tile == row.tile)
        << "another kernel ran";
  }
  EXPECT_EQ(rows, 12);
}

}  // namespace
}  // namespace tilemoe::test
