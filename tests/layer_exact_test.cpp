// Every case on small whole numbers, bit for bit equal to the reference: detects every index error.
#include "layer_support.h"

namespace tilemoe::verify {
namespace {

std::vector<Case> integer_cases() {
  std::vector<Case> cases;
  for (const Case& one : verification_cases())
    if (has_integer_form(one)) cases.push_back(integer_form(one));
  return cases;
}

class LayerExact : public testing::TestWithParam<Case> {};

TEST_P(LayerExact, EqualsReference) {
  expect_passed(check_case(GetParam(), 1));
}

INSTANTIATE_TEST_SUITE_P(, LayerExact, testing::ValuesIn(integer_cases()), test_name);

}  // namespace
}  // namespace tilemoe::verify
