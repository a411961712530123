// Every case on unit-scale data against float64: each tensor within its limit, and outside it when
// zeroed, when two rows are swapped or when one expert is dropped.
#include "layer_support.h"

namespace tilemoe::verify {
namespace {

class LayerBounded : public testing::TestWithParam<Case> {};

TEST_P(LayerBounded, IsNearFloat64) {
  expect_passed(check_case(GetParam(), 1));
}

INSTANTIATE_TEST_SUITE_P(Registry, LayerBounded, testing::ValuesIn(verification_cases()),
                         test_name);

// In an ordinary case none of the spoilings is skipped as meaningless.
TEST(LayerSpoilings, AreAllTriedOnEveryTensor) {
  for (const char* name : {"biases/float32", "biases/bfloat16", "biases/float16"}) {
    const Report report = check_case(named_case(name), 1);
    ASSERT_EQ(report.tensors.size(), static_cast<size_t>(kOutputs));
    for (const TensorReport& tensor : report.tensors)
      EXPECT_EQ(tensor.spoilings_tried, 3) << name << " " << output_name(tensor.output);
  }
}

// Results that cannot be spoiled are no pass: zeros in the place of all of them.
TEST(LayerSpoilings, ThatAreNotTriedFail) {
  const Case one = named_case("biases/bfloat16");
  const Inputs inputs = make_inputs(one, 1);
  Problem problem(inputs, host_memory());
  problem.run();
  Computed computed = problem.computed();
  std::fill(computed[kO].begin(), computed[kO].end(), 0.f);
  const Report report = judge(inputs, problem.pairs(), computed, Passes::kAll);
  EXPECT_FALSE(report.passed());
  for (const TensorReport& tensor : report.tensors) {
    EXPECT_EQ(tensor.spoilings_tried, tensor.output == kO ? 0 : 3);
    EXPECT_EQ(tensor.missed_spoilings.size(), tensor.output == kO ? 3u : 0u);
    EXPECT_TRUE(tensor.impossible_spoilings.empty());
  }
}

TEST(LayerSpoilings, AreImpossibleWithoutPairs) {
  for (const TensorReport& tensor : check_case(named_case("no-token/float32"), 1).tensors)
    EXPECT_EQ(tensor.impossible_spoilings.size(), 3u) << output_name(tensor.output);
}

}  // namespace
}  // namespace tilemoe::verify
