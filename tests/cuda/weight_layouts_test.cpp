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

// The tests that compute-sanitizer runs. One launch for both gradients would use the dtype and the
// layout of the first: it would write past a 16-bit second one, or half of a float32 second one.
void expect_two_gradients(bool (*differ)(const GradientForm& dW1, const GradientForm& dW1_up)) {
  expect_weight_layouts(kShape, {DType::kBFloat16}, cuda_memory(), [&](const WeightLayout& layout) {
    return layout.split() && layout.W1 == layout.W1_up && layout.dW1.present &&
           layout.dW1_up.present && differ(layout.dW1, layout.dW1_up);
  });
}

TEST(CudaWeightLayouts, GradientsOfTwoDTypesFloat32First) {
  expect_two_gradients([](const GradientForm& dW1, const GradientForm& dW1_up) {
    return dW1.float32 && !dW1_up.float32;
  });
}
TEST(CudaWeightLayouts, GradientsOfTwoDTypesFloat32Last) {
  expect_two_gradients([](const GradientForm& dW1, const GradientForm& dW1_up) {
    return !dW1.float32 && dW1_up.float32;
  });
}
TEST(CudaWeightLayouts, GradientsOfTwoMajors) {
  expect_two_gradients([](const GradientForm& dW1, const GradientForm& dW1_up) {
    return dW1.contiguous != dW1_up.contiguous;
  });
}
TEST(CudaWeightLayouts, WeightsOfTwoMajors) {
  expect_weight_layouts(kShape, {DType::kBFloat16}, cuda_memory(),
                        [](const WeightLayout& layout) { return layout.refused_forward(); });
}

}  // namespace
}  // namespace tilemoe::verify
