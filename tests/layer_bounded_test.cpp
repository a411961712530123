// Every case on unit-scale data against float64: each tensor within its limit, and outside it when
// zeroed, when two rows are swapped or when one expert is dropped.
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

TEST_P(LayerBounded, IsNearFloat64) {
  const Case& one = GetParam();
  const Report report = check_case(one, 1);
  expect_passed(report);
  // Nothing can be spoiled in a layer without a pair; of one token, a tensor may have a single row.
  for (const TensorReport& tensor : report.tensors) {
    SCOPED_TRACE(output_name(tensor.output));
    const int most = has_a_pair(one) ? static_cast<int>(std::size(kSpoilings)) : 0;
    EXPECT_LE(tensor.spoilings_tried, most);
    EXPECT_GE(tensor.spoilings_tried, one.outer_rows() == 1 ? most - 1 : most);
  }
}

INSTANTIATE_TEST_SUITE_P(Registry, LayerBounded, testing::ValuesIn(verification_cases()),
                         test_name);

}  // namespace
}  // namespace tilemoe::verify
