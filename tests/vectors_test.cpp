// The CPU backend's elementwise functions on every instruction set that was built and that this
// machine has, against plain loops: all values of the 16-bit types, ties, every length, steps.
#include <gtest/gtest.h>
#include <hwy/highway.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "core/activation_kinds.h"
#include "core/numbers.h"
#include "cpu/activation.h"
#include "cpu/elementwise.h"
#include "verify/activation.h"

namespace tilemoe::cpu {
namespace {

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();

std::vector<int64_t> targets() {
  std::vector<int64_t> all;
  const int64_t mask = hwy::SupportedTargets() & HWY_TARGETS;
  for (int bit = 0; bit < 63; ++bit)
    if (mask & int64_t{1} << bit) all.push_back(int64_t{1} << bit);
  return all;
}

class Vectors : public testing::TestWithParam<int64_t> {
 protected:
  void SetUp() override {
    use(GetParam());
    ASSERT_STREQ(vector_target(), hwy::TargetName(GetParam()));
  }
  void TearDown() override { use(0); }

 private:
  static void use(int64_t mask) {
    hwy::SetSupportedTargetsForTest(mask);
    hwy::GetChosenTarget().DeInit();  // chosen anew by the next call
  }
};

template <class Half>
constexpr tilemoe_dtype kDType = TILEMOE_FLOAT16;
template <>
constexpr tilemoe_dtype kDType<BFloat16> = TILEMOE_BFLOAT16;

uint32_t bits_of(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof bits);
  return bits;
}
float from_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof x);
  return x;
}

void expect_same(float got, float expected, uint32_t from) {
  if (std::isnan(expected))
    ASSERT_TRUE(std::isnan(got)) << "from " << from;
  else
    ASSERT_EQ(bits_of(got), bits_of(expected)) << "from " << from;
}

template <class Half>
void widens_every_value() {
  constexpr int64_t kValues = 65536;
  std::vector<Half> narrow(kValues), spaced(2 * kValues - 1, Half{0x5555});
  for (uint32_t i = 0; i < kValues; ++i)
    narrow[i].bits = spaced[2 * i].bits = static_cast<uint16_t>(i);
  std::vector<float> wide(kValues), even(kValues);
  to_float(narrow.data(), kDType<Half>, 1, wide.data(), kValues);
  to_float(spaced.data(), kDType<Half>, 2, even.data(), kValues);
  for (uint32_t i = 0; i < kValues; ++i) {
    expect_same(wide[i], tilemoe::to_float(narrow[i]), i);
    expect_same(even[i], tilemoe::to_float(narrow[i]), i);
  }
}

TEST_P(Vectors, WidenEveryValue) {
  widens_every_value<BFloat16>();
  widens_every_value<Float16>();
}

// Each 16-bit value, half-way to the next one, and a float32 step to either side; and random bits.
template <class Half>
std::vector<float> values_to_round() {
  std::vector<float> values;
  for (uint32_t i = 0; i < 65535; ++i) {
    const float low = tilemoe::to_float(Half{static_cast<uint16_t>(i)});
    const float high = tilemoe::to_float(Half{static_cast<uint16_t>(i + 1)});
    const float middle = low + (high - low) / 2;
    for (float x : {low, middle, std::nextafter(middle, low), std::nextafter(middle, high)})
      values.push_back(x);
  }
  std::mt19937 random(1);
  for (int i = 0; i < 100000; ++i) values.push_back(from_bits(static_cast<uint32_t>(random())));
  for (float x : {kNaN, -kNaN, 65504.f, 65519.99f, 65520.f, 65536.f, 1e38f, 3.4e38f})
    values.push_back(x);
  values.resize(values.size() / 8 * 8 + 8, 0.f);
  return values;
}

template <class Half>
void rounds_to_the_nearest() {
  const std::vector<float> values = values_to_round<Half>();
  const auto count = static_cast<int64_t>(values.size());
  std::vector<Half> narrow(values.size()), spaced(3 * values.size(), Half{0x5555});
  from_float(values.data(), narrow.data(), kDType<Half>, 1, count, false);
  from_float(values.data(), spaced.data(), kDType<Half>, 3, count, false);
  for (size_t i = 0; i < values.size(); ++i) {
    Half expected{};
    tilemoe::store(values[i], expected);
    expect_same(tilemoe::to_float(narrow[i]), tilemoe::to_float(expected), bits_of(values[i]));
    expect_same(tilemoe::to_float(spaced[3 * i]), tilemoe::to_float(expected), bits_of(values[i]));
    ASSERT_EQ(spaced[3 * i + 1].bits, 0x5555);
    ASSERT_EQ(spaced[3 * i + 2].bits, 0x5555);
  }
}

TEST_P(Vectors, RoundToTheNearestTiesToEven) {
  rounds_to_the_nearest<BFloat16>();
  rounds_to_the_nearest<Float16>();
}

// Small whole numbers: every sum is exact in every type and order. An additional element at the end
// must not change.
template <class Element>
struct Row {
  std::vector<Element> values;
  Row(int64_t count, int seed) : values(static_cast<size_t>(count) + 1) {
    for (int64_t i = 0; i < count; ++i) set(i, static_cast<float>((i * 5 + seed) % 7 - 3));
    set(count, kNaN);
  }
  void set(int64_t i, float x) { tilemoe::store(x, values[static_cast<size_t>(i)]); }
  float operator[](int64_t i) const { return tilemoe::to_float(values[static_cast<size_t>(i)]); }
  bool end_is_untouched() const { return std::isnan(tilemoe::to_float(values.back())); }
};

template <class Element>
void adds_up(tilemoe_dtype dtype, int64_t count) {
  const Row<Element> a(count, 1), b(count, 2);
  Row<float> sum(count, 3);
  add_scaled(a.values.data(), dtype, 2.f, sum.values.data(), count);
  float product = 0;
  for (int64_t i = 0; i < count; ++i) {
    ASSERT_EQ(sum[i], Row<float>(count, 3)[i] + 2 * a[i]) << i << " of " << count;
    product += a[i] * b[i];
  }
  EXPECT_TRUE(sum.end_is_untouched());
  EXPECT_EQ(dot(a.values.data(), b.values.data(), dtype, count), product);

  Row<Element> out(count, 4);
  const Row<Element> before = out;
  from_float(sum.values.data(), out.values.data(), dtype, 1, count, true);
  for (int64_t i = 0; i < count; ++i) ASSERT_EQ(out[i], before[i] + sum[i]);
  EXPECT_TRUE(out.end_is_untouched());
}

template <class Element>
void sums_rows(tilemoe_dtype dtype, int64_t count) {
  const int64_t stride = count + 8;
  std::vector<Element> rows;
  for (int r = 0; r < 3; ++r) {
    Row<Element> row(count, r);
    row.values.resize(static_cast<size_t>(stride), row.values.back());
    rows.insert(rows.end(), row.values.begin(), row.values.end());
  }
  const Row<Element> addend(count, 5);
  const int32_t picked[] = {2, -1, 0, 2};
  const float scale[] = {2.f, kNaN, 3.f};
  Row<Element> out(count, 0);
  const auto check = [&](bool adds, bool scales) {
    sum_rows({.dtype = dtype,
              .addend = adds ? addend.values.data() : nullptr,
              .rows = rows.data(),
              .row_stride = stride,
              .row = picked,
              .terms = 4,
              .scale = scales ? scale : nullptr,
              .out = out.values.data()},
             count);
    for (int64_t i = 0; i < count; ++i) {
      const float first = Row<Element>(count, 0)[i], last = Row<Element>(count, 2)[i];
      const float total = scales ? 2 * first + 6 * last : first + 2 * last;
      ASSERT_EQ(out[i], total + (adds ? addend[i] : 0)) << i << " of " << count;
    }
    EXPECT_TRUE(out.end_is_untouched());
  };
  for (bool adds : {false, true})
    for (bool scales : {false, true}) check(adds, scales);
}

TEST_P(Vectors, AddUpRowsOfEveryLength) {
  for (int64_t count = 8; count <= 136; count += 8) {
    adds_up<float>(TILEMOE_FLOAT32, count);
    adds_up<BFloat16>(TILEMOE_BFLOAT16, count);
    adds_up<Float16>(TILEMOE_FLOAT16, count);
    sums_rows<float>(TILEMOE_FLOAT32, count);
    sums_rows<BFloat16>(TILEMOE_BFLOAT16, count);
    sums_rows<Float16>(TILEMOE_FLOAT16, count);
  }
}

// The matrix has two interleaved halves; a row of the second one ends with the memory.
TEST_P(Vectors, ReadNothingPastAnInterleavedRow) {
  for (int64_t count = 8; count <= 72; count += 8) {
    std::vector<float> pairs(static_cast<size_t>(2 * count));
    for (size_t i = 0; i < pairs.size(); ++i) pairs[i] = static_cast<float>(i);
    std::vector<float> odd(static_cast<size_t>(count));
    to_float(pairs.data() + 1, TILEMOE_FLOAT32, 2, odd.data(), count);
    for (size_t i = 0; i < odd.size(); ++i) ASSERT_EQ(odd[i], static_cast<float>(2 * i + 1));
  }
}

std::vector<tilemoe_experts> activations() {
  std::vector<tilemoe_experts> all;
  for (tilemoe_activation activation : kActivations) {
    tilemoe_experts experts{};
    experts.activation = activation;
    all.push_back(experts);
  }
  all.push_back({});
  all.back().clamp = 2, all.back().alpha = 1.702f, all.back().up_shift = 1;
  return all;
}

TEST_P(Vectors, ComputeActivationsAndTheirGradients) {
  constexpr int64_t kCount = 4000;
  constexpr double kTolerance = 1e-5, kSmallest = 1e-37, kScore = 0.5, kDA = 3;
  for (const tilemoe_experts& experts : activations()) {
    SCOPED_TRACE(tilemoe_activation_name(experts.activation));
    verify::Case c;
    c.activation = static_cast<Activation>(experts.activation);
    c.clamp = experts.clamp, c.alpha = experts.alpha, c.up_shift = experts.up_shift;
    std::vector<float> gate(kCount), up(kCount), A(kCount), dA(kCount, kDA), d_gate(kCount),
        d_up(kCount), A_scaled(kCount);
    for (int64_t i = 0; i < kCount; ++i) {
      gate[static_cast<size_t>(i)] = static_cast<float>(i - kCount / 2) / 250;  // -8 to 8
      up[static_cast<size_t>(i)] = static_cast<float>(i % 61 - 30) / 10;
    }
    const bool gated = tilemoe_activation_gated(experts.activation) != 0;
    const float* up_or_null = gated ? up.data() : nullptr;
    activate(experts, gate.data(), up_or_null, A.data(), kCount);
    const float ds = activate_gradient(experts,
                                       {.gate = gate.data(),
                                        .up = up_or_null,
                                        .dA = dA.data(),
                                        .score = kScore,
                                        .d_gate = d_gate.data(),
                                        .d_up = gated ? d_up.data() : nullptr,
                                        .A_scaled = A_scaled.data()},
                                       kCount);
    double sum = 0, sum_of_sizes = 0;
    for (size_t i = 0; i < gate.size(); ++i) {
      const double g = gate[i], u = up[i];
      const verify::ActivationValue<double> truth = verify::activate<double>(c, g, u);
      const double size = kTolerance * (std::fabs(truth.A) + kSmallest);
      ASSERT_LE(std::fabs(static_cast<double>(A[i]) - truth.A), size) << g << ", " << u;
      ASSERT_EQ(A_scaled[i], static_cast<float>(kScore) * A[i]);
      // The slope crosses zero, where its terms cancel.
      const double slope_size =
          kTolerance * (std::fabs(truth.dgate) + (1 + std::fabs(u)) * std::min(1.0, std::exp(g)));
      ASSERT_LE(std::fabs(static_cast<double>(d_gate[i]) / (kScore * kDA) - truth.dgate),
                slope_size)
          << g << ", " << u;
      if (gated) {
        ASSERT_LE(std::fabs(static_cast<double>(d_up[i]) / (kScore * kDA) - truth.dup),
                  kTolerance * (std::fabs(truth.dup) + kSmallest))
            << g << ", " << u;
      }
      sum += kDA * truth.A, sum_of_sizes += kDA * std::fabs(truth.A);
    }
    EXPECT_LE(std::fabs(static_cast<double>(ds) - sum), kTolerance * sum_of_sizes);
  }
}

TEST_P(Vectors, PassNaNThroughActivations) {
  for (const tilemoe_experts& experts : activations()) {
    SCOPED_TRACE(tilemoe_activation_name(experts.activation));
    const bool gated = tilemoe_activation_gated(experts.activation) != 0;
    for (bool in_gate : {true, false}) {
      if (!in_gate && !gated) continue;
      std::vector<float> gate(8, 1.f), up(8, 1.f), A(8);
      (in_gate ? gate : up)[5] = kNaN;
      activate(experts, gate.data(), gated ? up.data() : nullptr, A.data(), 8);
      for (size_t i = 0; i < A.size(); ++i) EXPECT_EQ(std::isnan(A[i]), i == 5) << i;
    }
  }
}

std::string target_name(const testing::TestParamInfo<int64_t>& target) {
  return hwy::TargetName(target.param);
}

INSTANTIATE_TEST_SUITE_P(, Vectors, testing::ValuesIn(targets()), target_name);

}  // namespace
}  // namespace tilemoe::cpu
