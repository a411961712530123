// Layers with quantised weights: the bits of the same layer with the dequantised ones, whatever
// divides a pass, and the memory that they take.
#include "layer_support.h"

namespace tilemoe::verify {
namespace {

std::vector<Case> quantized_cases() {
  std::vector<Case> cases;
  for (const Case& one : verification_cases())
    if (one.recipe == Recipe::kBf16 &&
        (one.format_1 != Format::kNone || one.format_2 != Format::kNone))
      cases.push_back(one);
  return cases;
}

// The same layer, its weights given as the values.
Inputs dequantized(Inputs inputs) {
  Case& one = inputs.test_case;
  one.format_1 = one.format_2 = Format::kNone, one.weight_blocks = 0;
  inputs.quantized = {};
  return inputs;
}

Computed run(const Inputs& inputs) {
  Problem problem(inputs);
  problem.run();
  EXPECT_EQ(problem.damage(), std::vector<std::string>());
  return problem.computed();
}

class LayerQuantized : public testing::TestWithParam<Case> {};

TEST_P(LayerQuantized, HasTheSameBits) {
  const Inputs inputs = make_inputs(GetParam(), 5);
  expect_same_bits(run(inputs), run(dequantized(inputs)));
}

TEST_P(LayerQuantized, HasThemInBlocks) {
  Inputs inputs = make_inputs(GetParam(), 6);
  inputs.test_case.weight_blocks = 0;
  const Computed whole = run(inputs);
  for (const int32_t blocks : {2, 4, 100}) {
    inputs.test_case.weight_blocks = blocks;
    expect_same_bits(run(inputs), whole);
  }
}

TEST_P(LayerQuantized, InfersTheSame) {
  const Inputs inputs = make_inputs(GetParam(), 7);
  Problem problem(inputs), expected(dequantized(inputs));
  for (Problem* each : {&problem, &expected}) each->poison(), each->route(), each->infer();
  EXPECT_EQ(first_difference(problem.computed()[kO], expected.computed()[kO]), -1);
  EXPECT_EQ(problem.damage(), std::vector<std::string>());
}

INSTANTIATE_TEST_SUITE_P(, LayerQuantized, testing::ValuesIn(quantized_cases()), test_name);

// ------------------------------------------------- memory

constexpr int64_t kD = 256, kN = 512, kE = 8;

Experts experts(Format format_1, Format format_2, int32_t weight_blocks = 0) {
  return {.device = Device::kCpu,
          .dtype = DType::kBFloat16,
          .d = kD,
          .n = kN,
          .E = kE,
          .format_1 = format_1,
          .format_2 = format_2,
          .weight_blocks = weight_blocks};
}

constexpr size_t kW1 = 2 * kE * 2 * kN * kD, kW2 = 2 * kE * kD * kN;

// A and Y live with what the steps after them take; W1's place is W2's and Y's.
TEST(QuantizedMemory, OfForwardIsThatOfOneWeight) {
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, 64, kE, 2);
  const size_t Y = 2 * 128 * kD;
  const auto bytes = [&](const Experts& of) { return of.workspace_bytes(spec, Pass::kForward); };
  const size_t dense = bytes(experts(Format::kNone, Format::kNone));
  EXPECT_EQ(bytes(experts(Format::kFp8, Format::kNone)), dense - Y + kW1);
  EXPECT_EQ(bytes(experts(Format::kNone, Format::kMxfp4)), dense + kW2);
  EXPECT_EQ(bytes(experts(Format::kNf4, Format::kNf4)), dense - Y + kW1);
  EXPECT_EQ(bytes(experts(Format::kNf4, Format::kNf4, 4)), dense - Y + kW1 / 4);
  EXPECT_EQ(bytes(experts(Format::kNf4, Format::kNf4, 8)),
            dense - Y + std::max(kW1 / 8, Y + kW2 / 8));
  EXPECT_EQ(bytes(experts(Format::kNone, Format::kNone, 4)), dense);
}

TEST(QuantizedMemory, OfBackwardIsThatOfOneWeight) {
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, 64, kE, 2);
  const auto bytes = [&](const Experts& of, uint32_t gradients) {
    return of.workspace_bytes(spec, BackwardMode::kWhole, gradients);
  };
  const Experts dense = experts(Format::kNone, Format::kNone);
  const Experts quantized = experts(Format::kNf4, Format::kNf4);
  // ds alone has no use for W1, and needs no dH.
  EXPECT_EQ(bytes(quantized, TILEMOE_GRADIENT_S), bytes(dense, TILEMOE_GRADIENT_S) + kW2);
  EXPECT_EQ(bytes(quantized, TILEMOE_GRADIENT_X), bytes(dense, TILEMOE_GRADIENT_X) + kW1);
  // All that can be requested.
  EXPECT_EQ(bytes(quantized, 0),
            bytes(quantized, TILEMOE_GRADIENT_X | TILEMOE_GRADIENT_S | TILEMOE_GRADIENT_B1 |
                                 TILEMOE_GRADIENT_B1_UP | TILEMOE_GRADIENT_B2 |
                                 TILEMOE_GRADIENT_LORA_1 | TILEMOE_GRADIENT_LORA_2));
  for (const uint32_t gradient : {TILEMOE_GRADIENT_W1, TILEMOE_GRADIENT_W1_UP, TILEMOE_GRADIENT_W2})
    EXPECT_THROW(bytes(quantized, gradient), Error);
  EXPECT_NO_THROW(bytes(experts(Format::kNf4, Format::kNone), TILEMOE_GRADIENT_W2));
}

TEST(QuantizedMemory, SavedIsThatOfTheDequantized) {
  const RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, 64, kE, 2);
  EXPECT_EQ(experts(Format::kNf4, Format::kFp8).saved_bytes(spec).total,
            experts(Format::kNone, Format::kNone).saved_bytes(spec).total);
}

}  // namespace
}  // namespace tilemoe::verify
