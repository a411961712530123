// Every case on unit-scale data against float64: each tensor within its limit, and outside it when
// zeroed, when two rows are swapped, when one expert is dropped or when its adapters are wrong.
#include <algorithm>
#include <iterator>

#include "layer_support.h"
#include "verify/spoil.h"

namespace tilemoe::verify {
namespace {

class LayerBounded : public testing::TestWithParam<Case> {};

bool has_a_pair(const Case& one) {
  if (one.routing != RoutingKind::kGrouped) return one.T > 0;
  return std::any_of(one.counts.begin(), one.counts.end(), [](int64_t count) { return count > 0; });
}

// Whether the output depends on the case's adapters.
bool has_adapters(const Case& one, Output output) {
  if (output == kDb2 || !one.lora.any()) return false;
  return one.lora.rank_1() > 0 || (output != kH && output != kDW2);
}

TEST_P(LayerBounded, IsNearFloat64) {
  const Case& one = GetParam();
  const Report report = check_case(one, 1);
  expect_passed(report);
  // A layer without a pair cannot be spoiled; with one token, a tensor may have a single row.
  for (const TensorReport& tensor : report.tensors) {
    SCOPED_TRACE(output_name(tensor.output));
    const int of_every_layer = 3, all = static_cast<int>(std::size(kSpoilings));
    const int max_spoilings = !has_a_pair(one)                   ? 0
                              : has_adapters(one, tensor.output) ? all
                                                                 : of_every_layer;
    EXPECT_LE(tensor.spoilings_tried, max_spoilings);
    // Two columns of B may change dB only by way of H or dA': not at all of a single adapter.
    const bool of_B = tensor.output == kDB1 || tensor.output == kDB2;
    const int not_tried = one.outer_rows() == 1 || of_B ? 1 : 0;
    EXPECT_GE(tensor.spoilings_tried, max_spoilings - not_tried);
  }
}

INSTANTIATE_TEST_SUITE_P(, LayerBounded, testing::ValuesIn(verification_cases()), test_name);

// Results that cannot be spoiled do not pass: zeros in place of all of them.
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
    EXPECT_EQ(tensor.spoilings_tried, 3);
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
