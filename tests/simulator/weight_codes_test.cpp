// Which quantised weights forward reads as codes, and that it then dequantises nothing and computes
// the same bits, on a simulated GPU.
#include "cuda/weight_codes.h"

#include <gtest/gtest.h>

#include <cctype>
#include <cstdint>
#include <ostream>
#include <string>
#include <utility>
#include <vector>

#include "core/backend.h"
#include "layer/layer.h"
#include "lora_problem.h"
#include "step_names.h"
#include "verify/problem.h"
#include "verify/registry.h"

namespace tilemoe::test {
namespace {

// Ends with the default.
struct MaxRows {
  explicit MaxRows(int64_t rows) { cuda::set_max_rows_of_codes(rows); }
  ~MaxRows() { cuda::set_max_rows_of_codes({}); }
};

// A layer of 4 experts without data.
struct Layer {
  explicit Layer(tilemoe_format format, int64_t d = 128, int64_t n = 192) {
    experts.dtype = TILEMOE_BFLOAT16, experts.activation = TILEMOE_SWIGLU;
    experts.E = 4, experts.d = d, experts.n = n;
    experts.format_1 = experts.format_2 = format;
    weights.W1.stride[1] = d, weights.W2.stride[1] = n;
    weights.W1.stride[2] = weights.W2.stride[2] = 1;
  }
  CodesRead read(int64_t capacity = 4) const {
    return cuda::codes_read(
        {.experts = experts, .weights = weights, .capacity = capacity, .plan = nullptr});
  }

  tilemoe_experts experts{};
  tilemoe_weights weights{};
};

void expect(const CodesRead& read, bool W1, bool W2) {
  EXPECT_EQ(read.W1, W1);
  EXPECT_EQ(read.W2, W2);
}

TEST(WeightCodes, AreReadIfTheirRowsCanBeCopied) {
  simulate("sm80");
  expect(Layer(TILEMOE_FORMAT_NONE).read(), false, false);
  expect(Layer(TILEMOE_FORMAT_FP8, 144, 136).read(), true, false);
  expect(Layer(TILEMOE_FORMAT_MXFP4, 96, 160).read(), true, true);
  expect(Layer(TILEMOE_FORMAT_NVFP4, 48, 96).read(), false, true);
  expect(Layer(TILEMOE_FORMAT_NF4, 128, 96).read(), true, false);
  expect(Layer(TILEMOE_FORMAT_NF4_DOUBLE, 96, 192).read(), false, true);
  Layer layer(TILEMOE_FORMAT_MXFP4);
  layer.experts.format_1 = TILEMOE_FORMAT_NONE;
  expect(layer.read(), false, true);
}

TEST(WeightCodes, AreReadWithAdaptersInEachLayoutOfTheGate) {
  simulate("sm80");
  for (const tilemoe_gate_layout layout :
       {TILEMOE_GATE_CONCATENATED, TILEMOE_GATE_INTERLEAVED, TILEMOE_GATE_SPLIT})
    for (const int32_t rank : {0, 8}) {
      Layer layer(TILEMOE_FORMAT_NF4);
      layer.experts.gate_layout = layout;
      layer.experts.rank_1 = layer.experts.rank_2 = rank;
      expect(layer.read(), true, true);
      layer.experts.activation = TILEMOE_RELU_SQUARED, layer.experts.dtype = TILEMOE_FLOAT16;
      expect(layer.read(), true, true);
    }
}

TEST(WeightCodes, AreReadWithinTheLimitsOfRows) {
  simulate("sm80");
  for (const tilemoe_format format : {TILEMOE_FORMAT_FP8, TILEMOE_FORMAT_MXFP4}) {
    const Layer layer(format);
    const int64_t limit = 4 * cuda::max_rows_of_codes(format);
    expect(layer.read(3), false, false);
    expect(layer.read(4), true, true);
    expect(layer.read(limit), true, true);
    expect(layer.read(limit + 1), false, false);
  }
  EXPECT_GT(cuda::max_rows_of_codes(TILEMOE_FORMAT_FP8),
            cuda::max_rows_of_codes(TILEMOE_FORMAT_NF4));
  const Layer layer(TILEMOE_FORMAT_MXFP4);
  const MaxRows thousand(1000);
  expect(layer.read(1), true, true);
  expect(layer.read(4000), true, true);
  const MaxRows none(0);
  expect(layer.read(4), false, false);
}

TEST(WeightCodes, AreNotReadAcrossTheirOrderOrByOtherArchs) {
  simulate("sm80");
  Layer layer(TILEMOE_FORMAT_FP8);
  std::swap(layer.weights.W1.stride[1], layer.weights.W1.stride[2]);
  expect(layer.read(), false, true);
  simulate("sm90");
  expect(Layer(TILEMOE_FORMAT_FP8).read(), false, false);
}

// The cases of bfloat16 with quantised weights; CodesSteps has float16.
std::vector<verify::Case> cases() {
  std::vector<verify::Case> cases;
  for (const verify::Case& one : verify::verification_cases())
    if ((one.format_1 != Format::kNone || one.format_2 != Format::kNone) &&
        one.dtype == DType::kBFloat16 && one.recipe == Recipe::kBf16)
      cases.push_back(one);
  return cases;
}

class CodesInForward : public testing::TestWithParam<verify::Case> {};

TEST_P(CodesInForward, KeepTheBits) {
  simulate("sm80");
  const verify::Case& one = GetParam();
  const verify::Inputs inputs = verify::make_inputs(one, 1);
  const auto run = [&](int64_t max_rows, StepNames& names) {
    const MaxRows limit(max_rows);
    verify::Problem problem(inputs, verify::cuda_memory());
    problem.poison();
    problem.route();
    const ForwardArgs args = problem.forward_args();
    const tilemoe_experts experts = problem.experts().to_c();
    const tilemoe_weights weights = args.weights.to_c();
    const tilemoe_forward_args c_args = args.to_c(weights);
    forward(&experts, &c_args, &names);
    expect_clean_run();
    EXPECT_EQ(problem.damage(), std::vector<std::string>());
    return problem.fingerprints();
  };
  StepNames of_codes, of_values;
  EXPECT_EQ(run(int64_t{1} << 32, of_codes), run(0, of_values));
  const auto reads = [](Format format, int64_t columns, bool transposed) {
    const bool is_nf4 = format == Format::kNf4 || format == Format::kNf4Double;
    return !transposed && columns % (is_nf4 ? 64 : format == Format::kFp8 ? 16 : 32) == 0;
  };
  const bool has_rows = one.T > 0 || !one.counts.empty();
  const bool quantized_1 = has_rows && one.format_1 != Format::kNone;
  const bool quantized_2 = has_rows && one.format_2 != Format::kNone;
  EXPECT_EQ(of_values.have(step::dequantize_W1), quantized_1);
  EXPECT_EQ(of_values.have(step::dequantize_W2), quantized_2);
  EXPECT_EQ(of_codes.have(step::dequantize_W1),
            quantized_1 && !reads(one.format_1, one.d, one.W1_transposed));
  EXPECT_EQ(of_codes.have(step::dequantize_W2),
            quantized_2 && !reads(one.format_2, one.n, one.W2_transposed));
}

INSTANTIATE_TEST_SUITE_P(, CodesInForward, testing::ValuesIn(cases()), [](const auto& test) {
  std::string name = test.param.name;
  for (char& letter : name)
    if (std::isalnum(static_cast<unsigned char>(letter)) == 0) letter = '_';
  return name;
});

}  // namespace
}  // namespace tilemoe::test
