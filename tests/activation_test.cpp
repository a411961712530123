// The activations alone, through the public interface: with unit weights O is act(x) and dX is
// act'(x) dO.
#include "verify/activation.h"

#include <cmath>

#include "core/activation_kinds.h"
#include "layer_support.h"
#include "verify/number.h"

namespace tilemoe::verify {
namespace {

constexpr double kTolerance = 0x1p-13;
constexpr double kSmallestNormal = 0x1p-126;  // below it float32 may flush to zero
constexpr double kRange = 20;

struct Shape {
  std::string name;
  Activation activation;
  float clamp = 0, alpha = 0, up_shift = 0;
};

void PrintTo(const Shape& c, std::ostream* out) {
  *out << c.name;
}

// One expert of d = n, W1's gate rows and W2 unit matrices, up the constant 1 by its bias: then A
// is act(x, 1), and so is O.
Inputs unit_layer(const Shape& shape, DType dtype) {
  constexpr int64_t kTokens = 4001, kWidth = 8;
  Inputs inputs;
  Case& c = inputs.test_case;
  c = {.name = shape.name,
       .T = kTokens,
       .d = kWidth,
       .n = kWidth,
       .E = 1,
       .K = 1,
       .dtype = dtype,
       .activation = shape.activation,
       .clamp = shape.clamp,
       .alpha = shape.alpha,
       .up_shift = shape.up_shift,
       .biases = true,
       .routing = RoutingKind::kGeneral};
  const auto elements = static_cast<size_t>(kTokens * kWidth);
  inputs.X.resize(elements);
  for (size_t i = 0; i < elements; ++i) {
    const double part = static_cast<double>(i) / static_cast<double>(elements - 1);
    inputs.X[i] = static_cast<float>(round_to(dtype, kRange * (2 * part - 1)));
  }
  inputs.dO.assign(elements, 1);
  ExpertValues& weights = inputs.weights;
  const auto h = static_cast<size_t>(c.h_width());
  weights.W1.assign(h * kWidth, 0);
  weights.W2.assign(kWidth * kWidth, 0);
  weights.b1.assign(h, 0);
  weights.b2.assign(kWidth, 0);
  for (size_t j = 0; j < kWidth; ++j) weights.W1[j * kWidth + j] = weights.W2[j * kWidth + j] = 1;
  for (size_t j = kWidth; j < h; ++j) weights.b1[j] = 1;
  for (int64_t t = 0; t < kTokens; ++t) inputs.tokens.push_back(t);
  inputs.experts.assign(kTokens, 0);
  inputs.scores.assign(kTokens, 1);
  return inputs;
}

class ActivationError : public testing::TestWithParam<Shape> {
 protected:
  // Calls expect(x, O, dX) with the layer's results for each x.
  template <class Expect>
  static void for_each(DType dtype, Expect&& expect) {
    const Inputs inputs = unit_layer(GetParam(), dtype);
    Problem problem(inputs);
    problem.run();
    const Computed computed = problem.computed();
    for (size_t i = 0; i < inputs.X.size(); ++i) {
      const double x = inputs.X[i];
      expect(activate<double>(inputs.test_case, x, 1), x, static_cast<double>(computed[kO][i]),
             static_cast<double>(computed[kDX][i]));
      if (testing::Test::HasFailure()) return;
    }
  }
};

TEST_P(ActivationError, IsBelowTheToleranceInFloat32) {
  for_each(DType::kFloat32, [](ActivationValue<double> truth, double x, double O, double dX) {
    EXPECT_LE(std::fabs(O - truth.A), kTolerance * std::fabs(truth.A) + kSmallestNormal)
        << "act(" << x << ") is " << O << ", expected " << truth.A;
    // Where a derivative crosses zero, its terms, as large as f and x f, cancel. The derivative of
    // GLU has one sign.
    const double cancelled =
        GetParam().activation == Activation::kGLU ? 0 : 0x1p-10 * std::min(1.0, std::exp(x));
    const double terms = std::fabs(truth.dgate) + cancelled;
    EXPECT_LE(std::fabs(dX - truth.dgate), kTolerance * terms + kSmallestNormal)
        << "act'(" << x << ") is " << dX << ", expected " << truth.dgate;
  });
}

// In 16 bits A, Y and O hold the same value, so O is A rounded once.
TEST_P(ActivationError, IsOneRoundingIn16Bits) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16})
    for_each(dtype, [&](ActivationValue<double> truth, double x, double O, double) {
      const double slack = kTolerance * std::fabs(truth.A) + kSmallestNormal;
      EXPECT_GE(O, round_to(dtype, truth.A - slack)) << "at " << x;
      EXPECT_LE(O, round_to(dtype, truth.A + slack)) << "at " << x;
    });
}

// Every activation, gpt-oss's form of SwiGLU, and each of its three numbers alone.
std::vector<Shape> shapes() {
  std::vector<Shape> all = {
      {.name = "swiglu_clamped",
       .activation = Activation::kSwiGLU,
       .clamp = 7,
       .alpha = 1.702f,
       .up_shift = 1},
      {.name = "swiglu_clamp", .activation = Activation::kSwiGLU, .clamp = 7},
      {.name = "swiglu_alpha", .activation = Activation::kSwiGLU, .alpha = 2},
      {.name = "swiglu_shift", .activation = Activation::kSwiGLU, .up_shift = 1}};
  for (tilemoe_activation activation : kActivations)
    all.push_back({.name = tilemoe_activation_name(activation),
                   .activation = static_cast<Activation>(activation)});
  return all;
}

INSTANTIATE_TEST_SUITE_P(, ActivationError, testing::ValuesIn(shapes()),
                         [](const auto& shape) { return shape.param.name; });

}  // namespace
}  // namespace tilemoe::verify
