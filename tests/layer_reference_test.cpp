// The reference itself: its backward against differences of its forward, its rounding against the
// definition of the types, the comparisons against errors of known size.
#include <cmath>
#include <limits>
#include <set>

#include "core/activation_kinds.h"
#include "layer_support.h"
#include "verify/compare.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::verify {
namespace {

// ---------------------------------------------------------------- finite differences

struct Shape {
  std::string name;
  Activation activation;
  float clamp = 0, alpha = 0, up_shift = 0;
};

void PrintTo(const Shape& c, std::ostream* out) {
  *out << c.name;
}

class ReferenceGradient : public testing::TestWithParam<Shape> {
 protected:
  // Values on a grid of 2^-12, so that a step of 2^-10 from any of them is exact in float32.
  void SetUp() override {
    const Shape& shape = GetParam();
    case_ = {.name = shape.name,
             .T = 5,
             .d = 8,
             .n = 8,
             .E = 3,
             .K = 2,
             .activation = shape.activation,
             .clamp = shape.clamp,
             .alpha = shape.alpha,
             .up_shift = shape.up_shift,
             .biases = true,
             .routing = RoutingKind::kGeneral};
    inputs_ = make_inputs(case_, 7);
    ExpertValues& weights = inputs_.weights;
    for (auto* values :
         {&inputs_.X, &inputs_.dO, &weights.W1, &weights.W2, &weights.b1, &weights.b2})
      for (float& value : *values) value = std::round(value * 4096) / 4096;
    for (size_t p = 0; p < inputs_.tokens.size(); ++p)
      pairs_.push_back({.index = static_cast<int64_t>(p),
                        .row = static_cast<int64_t>(p),
                        .token = inputs_.tokens[p],
                        .expert = inputs_.experts[p],
                        .score = inputs_.scores[p]});
    ASSERT_GE(pairs_.size(), 8u);
  }

  // <O, dO>
  double loss() const {
    const std::vector<double> O = evaluate(inputs_, pairs_, Precision::kExact)[kO];
    double sum = 0;
    for (size_t i = 0; i < O.size(); ++i) sum += O[i] * static_cast<double>(inputs_.dO[i]);
    return sum;
  }

  // The derivative of the loss by a value: five points, error of the order of step^4.
  template <class Value>
  double derivative(Value& value) const {
    const Value before = value, step = static_cast<Value>(0x1p-10);
    const auto at = [&](int steps) {
      value = before + static_cast<Value>(steps) * step;
      return loss();
    };
    const double result = (at(-2) - 8 * at(-1) + 8 * at(1) - at(2)) / (12 * 0x1p-10);
    value = before;
    return result;
  }

  void expect_gradient(std::vector<float>& values, Output output) {
    const std::vector<double> gradient = evaluate(inputs_, pairs_, Precision::kExact)[output];
    ASSERT_EQ(gradient.size(), values.size());
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(gradient[i], derivative(values[i]), 1e-8) << output_name(output) << " at " << i;
  }

  Case case_;
  Inputs inputs_;
  std::vector<Pair> pairs_;
};

TEST_P(ReferenceGradient, AgreesWithDifferences) {
  expect_gradient(inputs_.X, kDX);
  expect_gradient(inputs_.weights.W1, kDW1);
  expect_gradient(inputs_.weights.W2, kDW2);
  expect_gradient(inputs_.weights.b1, kDb1);
  expect_gradient(inputs_.weights.b2, kDb2);
  const std::vector<double> ds = evaluate(inputs_, pairs_, Precision::kExact)[kDs];
  for (size_t p = 0; p < pairs_.size(); ++p)
    EXPECT_NEAR(ds[p], derivative(pairs_[p].score), 1e-8) << "ds at " << p;
}

// Every activation, and gpt-oss's form of SwiGLU.
std::vector<Shape> shapes() {
  std::vector<Shape> all = {{.name = "swiglu_clamped",
                             .activation = Activation::kSwiGLU,
                             .clamp = 1,
                             .alpha = 1.702f,
                             .up_shift = 1}};
  for (tilemoe_activation activation : kActivations)
    all.push_back({.name = tilemoe_activation_name(activation),
                   .activation = static_cast<Activation>(activation)});
  return all;
}

INSTANTIATE_TEST_SUITE_P(, ReferenceGradient, testing::ValuesIn(shapes()),
                         [](const auto& shape) { return shape.param.name; });

// ---------------------------------------------------------------- numbers

TEST(Numbers, RoundToTheNearestAndTiesToEven) {
  // bfloat16 has steps of 2^-7 above 1, float16 of 2^-10
  EXPECT_EQ(round_to(DType::kBFloat16, 1 + 0x1p-8), 1);
  EXPECT_EQ(round_to(DType::kBFloat16, 1 + 3 * 0x1p-8), 1 + 0x1p-6);
  EXPECT_EQ(round_to(DType::kBFloat16, 1 + 0x1p-8 + 0x1p-30), 1 + 0x1p-7);
  EXPECT_EQ(round_to(DType::kFloat16, -1 - 0x1p-11), -1);
  EXPECT_EQ(round_to(DType::kFloat16, 65519), 65504);
  EXPECT_EQ(round_to(DType::kFloat16, 65520), std::numeric_limits<double>::infinity());
  EXPECT_EQ(round_to(DType::kFloat16, 0x1p-25), 0);  // half of the smallest subnormal
  EXPECT_EQ(round_to(DType::kFloat16, 3 * 0x1p-25), 0x1p-23);
  EXPECT_EQ(round_to(DType::kFloat32, 1 + 0x1p-25), 1);
}

TEST(Numbers, EveryBitPatternSurvives) {
  for (DType dtype : {DType::kBFloat16, DType::kFloat16})
    for (uint32_t bits = 0; bits <= 0xffff; ++bits) {
      const double value = decode_16bit(dtype, static_cast<uint16_t>(bits));
      if (std::isnan(value)) continue;
      ASSERT_EQ(encode_16bit(dtype, value), bits) << tilemoe_dtype_name(to_c(dtype));
    }
}

TEST(Numbers, BFloat16IsTheUpperHalfOfFloat32) {
  Random random(1, 0);
  for (int i = 0; i < 1000; ++i) {
    const auto bits = static_cast<uint16_t>(random.bits());
    const uint32_t wide = uint32_t{bits} << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof value);
    if (std::isnan(value)) continue;
    EXPECT_EQ(decode_16bit(DType::kBFloat16, bits), value);
  }
}

// ---------------------------------------------------------------- comparisons

TEST(Comparison, MeasuresAnErrorOfKnownSize) {
  const std::vector<double> truth = {3, 4, 0, 5};  // rows of norm 5
  const Figures figures = measure(std::vector<float>{3, 4, 0, 5.5f}, truth, 2, 1e-2);
  EXPECT_DOUBLE_EQ(figures.frobenius, 0.5 / std::sqrt(50.0));
  EXPECT_DOUBLE_EQ(figures.worst_row, 0.1);
  EXPECT_EQ(figures.worst_row_index, 1);
}

TEST(Comparison, MeasuresSmallRowsByTheRmsNorm) {
  const std::vector<double> truth = {1, 0};  // rms norm sqrt(1/2)
  const Figures figures = measure(std::vector<float>{1, 0x1p-10f}, truth, 1, 1e-2);
  EXPECT_DOUBLE_EQ(figures.worst_row, 0x1p-10 / (1e-2 * std::sqrt(0.5)));
}

TEST(Comparison, NeverPassesNaN) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const Figures figures = measure(std::vector<float>{1, nan}, {1, 2}, 1, 1e-2);
  EXPECT_EQ(figures.first_nan, 1);
  EXPECT_FALSE(within(figures, {.frobenius = 1e30, .worst_row = 1e30}));
  EXPECT_FALSE(within({.frobenius = 0, .worst_row = std::nan("")}, {1, 1}));
  EXPECT_FALSE(within({.frobenius = std::nan(""), .worst_row = 0}, {1, 1}));
}

TEST(Comparison, FindsNaNInAnyRow) {
  std::vector<double> truth(12, 1);
  for (size_t i = 0; i < truth.size(); ++i) {
    std::vector<float> got(truth.size(), 1);
    got[i] = std::numeric_limits<float>::quiet_NaN();
    const Figures figures = measure(got, truth, 3, 1e-2);
    EXPECT_EQ(figures.first_nan, static_cast<int64_t>(i));
    EXPECT_TRUE(std::isnan(figures.frobenius));
    EXPECT_TRUE(std::isnan(figures.worst_row));
  }
}

TEST(Comparison, RequiresZerosToBeZero) {
  const std::vector<double> zeros(4, 0);
  EXPECT_TRUE(within(measure(std::vector<float>(4, 0), zeros, 2, 1e-2), kEqual));
  EXPECT_FALSE(within(measure(std::vector<float>{0, 0, 0, 1e-30f}, zeros, 2, 1e-2), {1, 1}));
}

// ---------------------------------------------------------------- registry

TEST(Registry, NamesAreUnique) {
  std::set<std::string> names;
  for (const auto* cases : {&verification_cases(), &bench_cases(), &huge_cases()})
    for (const Case& one : *cases) EXPECT_TRUE(names.insert(one.name).second) << one.name;
}

TEST(Registry, SizesDifferPerDimension) {
  const std::set<std::string> edges = {"one-token", "smallest", "every-expert", "single-expert"};
  for (const Case& one : verification_cases()) {
    if (edges.count(one.name.substr(0, one.name.find('/')))) continue;
    const std::set<int64_t> sizes = {one.outer_rows(), one.d, one.n, one.E, one.K};
    EXPECT_EQ(sizes.size(), 5u) << one.name;
  }
}

}  // namespace
}  // namespace tilemoe::verify
