// Weights and weight gradients on a GPU in every layout and dtype that the interface takes.
#include "weight_layouts.h"

namespace tilemoe::verify {
namespace {

const Case kShape{.T = 53, .d = 40, .n = 24, .E = 5, .K = 2};

TEST(CudaWeightLayouts, AllAreRightOrRefused) {
  expect_every_weight_layout(kShape, {DType::kBFloat16, DType::kFloat16}, cuda_memory());
}

// Experts so long that several CTAs have parts of their sums (split-K), through shared scratch.
TEST(CudaWeightLayouts, LongExpertsAreRightOrRefused) {
  expect_every_weight_layout({.T = 2417, .d = 104, .n = 72, .E = 3, .K = 2}, {DType::kBFloat16},
                             cuda_memory());
}

// What compute-sanitizer runs: one launch for both would write past the 16-bit gradient, or half of
// the float32 one.
TEST(CudaWeightLayouts, GradientsOfTwoDTypes) {
  expect_weight_layouts(kShape, {DType::kBFloat16}, cuda_memory(), [](const WeightLayout& layout) {
    return layout.split() && layout.W1 == layout.W1_up && layout.dW1.present &&
           layout.dW1_up.present && layout.dW1.float32 != layout.dW1_up.float32;
  });
}
TEST(CudaWeightLayouts, GradientsOfTwoMajors) {
  expect_weight_layouts(kShape, {DType::kBFloat16}, cuda_memory(), [](const WeightLayout& layout) {
    return layout.split() && layout.W1 == layout.W1_up && layout.dW1.present &&
           layout.dW1_up.present && layout.dW1.contiguous != layout.dW1_up.contiguous;
  });
}
TEST(CudaWeightLayouts, WeightsOfTwoMajors) {
  expect_weight_layouts(kShape, {DType::kBFloat16}, cuda_memory(),
                        [](const WeightLayout& layout) { return layout.refused_forward(); });
}

}  // namespace
}  // namespace tilemoe::verify
