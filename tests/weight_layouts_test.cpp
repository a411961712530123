#include "weight_layouts.h"

namespace tilemoe::verify {
namespace {

TEST(WeightLayouts, TableHasEveryCombination) {
  // W1's major by dW1: 2 * 5 each of not gated, concatenated and interleaved; split with W1_up's
  // major and dW1_up besides.
  EXPECT_EQ(weight_layouts().size(), 3u * 10 + 100);
}

TEST(WeightLayouts, AllAreRightOrRefused) {
  expect_every_weight_layout({.T = 53, .d = 40, .n = 24, .E = 5, .K = 2},
                             {DType::kFloat32, DType::kBFloat16, DType::kFloat16}, host_memory());
}

}  // namespace
}  // namespace tilemoe::verify
