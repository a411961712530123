// The arithmetic that decides orders: exp, sigmoid, keys, ranks, sums, 16-bit formats and random
// bits, against float64, exact cases and published values.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <vector>

#include "core/numbers.h"
#include "cpu/native_fma.h"
#include "routing/order.h"
#include "routing/rounding.h"

namespace tilemoe {
namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();
constexpr float kNaN = std::numeric_limits<float>::quiet_NaN();
constexpr float kSmallest = std::numeric_limits<float>::denorm_min();

// Distance of a float from `want`, in units of the last place of floats there.
double ulps(float got, double want) {
  int exponent = 0;
  std::frexp(want, &exponent);
  return std::fabs(got - want) / std::ldexp(1.0, std::max(exponent - 24, -149));
}

// Floats from `first` to `last` of one sign, every `step`-th.
std::vector<float> floats_between(float first, float last, int step) {
  std::vector<float> x;
  for (int64_t bits = order::bits_of(first); bits <= order::bits_of(last); bits += step)
    x.push_back(order::from_bits(static_cast<int32_t>(bits)));
  return x;
}

TEST(Exp, IsWithinOneUlpWherePositive) {
  for (float x : floats_between(0.f, 88.7228f, 5003)) {
    const double error = ulps(order::exp(x), std::exp(static_cast<double>(x)));
    ASSERT_TRUE(error <= 1.01) << "x = " << x << ", " << error << " ulp";
  }
}

TEST(Exp, IsWithinOneUlpWhereNegative) {
  for (float x : floats_between(0.f, 110.f, 5003)) {
    const double error = ulps(order::exp(-x), std::exp(-static_cast<double>(x)));
    ASSERT_TRUE(error <= 1.01) << "x = " << -x << ", " << error << " ulp";
  }
}

// Over runs of neighbours, where a wrong last bit would show, and from each run to the next.
TEST(Exp, NeverDecreases) {
  float before = 0.f;
  for (float start = -105.f; start < 89.5f; start += 0x1p-9f) {
    float x = start;
    for (int neighbour = 0; neighbour < 8; ++neighbour, x = std::nextafter(x, kInfinity)) {
      const float value = order::exp(x);
      ASSERT_GE(value, before) << "x = " << x;
      before = value;
    }
  }
}

TEST(Exp, IsExactAtTheEnds) {
  EXPECT_EQ(order::exp(0.f), 1.f);
  EXPECT_EQ(order::exp(-0.f), 1.f);
  EXPECT_EQ(order::exp(kSmallest), 1.f);
  EXPECT_EQ(order::exp(-kInfinity), 0.f);
  EXPECT_EQ(order::exp(kInfinity), kInfinity);
  EXPECT_EQ(order::exp(-104.f), 0.f);
  EXPECT_EQ(order::exp(-std::numeric_limits<float>::max()), 0.f);
  EXPECT_EQ(order::exp(std::numeric_limits<float>::max()), kInfinity);
  EXPECT_EQ(order::exp(88.73f), kInfinity);
  EXPECT_EQ(order::exp(-103.9f), kSmallest);
  EXPECT_TRUE(std::isnan(order::exp(kNaN)));
  EXPECT_TRUE(std::isnan(order::exp(-kNaN)));
}

TEST(Sigmoid, IsWithinThreeUlp) {
  for (float x : floats_between(0.f, 110.f, 5003)) {
    for (float y : {x, -x}) {
      const double want = 1 / (1 + std::exp(-static_cast<double>(y)));
      const double error = ulps(order::sigmoid(y), want);
      ASSERT_TRUE(error <= 2.4) << "x = " << y << ", " << error << " ulp";
    }
  }
}

TEST(Sigmoid, IsExactAtTheEnds) {
  EXPECT_EQ(order::sigmoid(0.f), 0.5f);
  EXPECT_EQ(order::sigmoid(-0.f), 0.5f);
  EXPECT_EQ(order::sigmoid(kInfinity), 1.f);
  EXPECT_EQ(order::sigmoid(-kInfinity), 0.f);
  EXPECT_TRUE(std::isnan(order::sigmoid(kNaN)));
}

TEST(SoftmaxWeight, OfTheLargestIsOneThoughItBeInfinite) {
  for (float max : {0.f, -3.f, kInfinity, -kInfinity}) {
    EXPECT_EQ(order::softmax_weight(max, max), 1.f);
    EXPECT_TRUE(std::isnan(order::softmax_weight(kNaN, max)));
  }
  EXPECT_EQ(order::softmax_weight(5.f, kInfinity), 0.f);
  EXPECT_EQ(order::softmax_weight(-kInfinity, 5.f), 0.f);
  EXPECT_EQ(order::softmax_weight(-kInfinity, kInfinity), 0.f);
}

// The two compilations of a loop, with and without fused multiply-add in hardware.
TEST(NativeFma, ChangesNoBit) {
  std::vector<float> x = floats_between(0.f, 100.f, 9973);
  for (float special : {kInfinity, kNaN, kSmallest}) x.push_back(special);
  const size_t count = x.size();
  for (size_t i = 0; i < count; ++i) x.push_back(-x[i]);
  std::vector<float> native(x.size()), generic(x.size());
  cpu::with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    for (size_t i = 0; i < x.size(); ++i) native[i] = order::exp(x[i]) + order::sigmoid(x[i]);
  });
  for (size_t i = 0; i < x.size(); ++i) generic[i] = order::exp(x[i]) + order::sigmoid(x[i]);
  for (size_t i = 0; i < x.size(); ++i)
    ASSERT_EQ(order::key(native[i]), order::key(generic[i])) << "x = " << x[i];
}

TEST(Key, OrdersAsNumbersDoAndNaNComesLast) {
  const std::vector<float> ascending = {
      -kInfinity, -std::numeric_limits<float>::max(), -1.f,     -kSmallest, 0.f, kSmallest,
      1.f,        std::numeric_limits<float>::max(),  kInfinity};
  for (size_t i = 0; i < ascending.size(); ++i) {
    EXPECT_EQ(order::from_key(order::key(ascending[i])), ascending[i]);
    for (size_t j = 0; j < ascending.size(); ++j)
      EXPECT_EQ(order::key(ascending[i]) < order::key(ascending[j]), i < j);
    EXPECT_LT(order::key(kNaN), order::key(ascending[i]));
    EXPECT_LT(order::key(-kNaN), order::key(ascending[i]));
  }
  EXPECT_EQ(order::key(-0.f), order::key(0.f));
  EXPECT_EQ(order::key(kNaN), order::key(-kNaN));
  EXPECT_TRUE(std::isnan(order::from_key(order::key(kNaN))));
}

TEST(Rank, PutsTheGreaterKeyFirstThenTheLowerIndex) {
  const std::vector<float> descending = {kInfinity, 2.f, 0.f, -1.f, -kInfinity, kNaN};
  const std::vector<int32_t> indices = {0, 1, 77, INT32_MAX};
  std::vector<uint64_t> ranks;
  for (float x : descending)
    for (int32_t index : indices) {
      ranks.push_back(order::rank(order::key(x), index));
      EXPECT_EQ(order::rank_index(ranks.back()), index);
      EXPECT_EQ(order::rank_key(ranks.back()), order::key(x));
    }
  for (size_t i = 0; i + 1 < ranks.size(); ++i) EXPECT_LT(ranks[i], ranks[i + 1]);
}

TEST(AddLanes, AddsInHalves) {
  // A sum whose result shows the order: 1 is lost next to 2^24 unless the large terms cancel first.
  float lanes[order::kSumLanes] = {};
  lanes[0] = 0x1p24f, lanes[16] = -0x1p24f, lanes[1] = 1.f, lanes[17] = 0x1p-24f;
  EXPECT_EQ(order::add_lanes(lanes), 1.f);  // (2^24 - 2^24) + (1 + 2^-24), the latter to even
  float others[order::kSumLanes] = {};
  others[0] = 0x1p24f, others[1] = -0x1p24f, others[16] = 1.f, others[17] = 1.f;
  EXPECT_EQ(order::add_lanes(others), 1.f);  // 2^24 + 1 = 2^24; -2^24 + 1 is exact
}

TEST(BFloat16, ReadsEveryValueAndRoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const BFloat16 given{static_cast<uint16_t>(bits)};
    const float x = to_float(given);
    const uint32_t exponent = bits >> 7 & 0xff, fraction = bits & 0x7f;
    BFloat16 back{};
    store(x, back);
    if (exponent == 0xff && fraction != 0) {
      ASSERT_TRUE(std::isnan(x) && std::isnan(to_float(back)));
      continue;
    }
    const double magnitude = exponent == 0      ? std::ldexp(fraction, -133)
                             : exponent == 0xff ? HUGE_VAL
                                                : std::ldexp(128 + fraction, int(exponent) - 134);
    ASSERT_EQ(x, bits >> 15 ? -magnitude : magnitude);
    ASSERT_EQ(back.bits, bits);
    if (exponent == 0xff) continue;
    // The float half-way to the next one goes to the even one, its neighbours to theirs.
    const int32_t half_way = order::bits_of(x) + 0x8000;
    for (int32_t offset : {-1, 0, 1}) {
      store(order::from_bits(half_way + offset), back);
      const bool up = offset > 0 || (offset == 0 && (bits & 1));
      ASSERT_EQ(back.bits, bits + (up ? 1 : 0)) << "bits " << bits << ", offset " << offset;
    }
  }
}

TEST(Float16, ReadsEveryValueAndRoundsToNearestEven) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    const Float16 given{static_cast<uint16_t>(bits)};
    const float x = to_float(given);
    const uint32_t exponent = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
    Float16 back{};
    store(x, back);
    if (exponent == 0x1f && fraction != 0) {
      ASSERT_TRUE(std::isnan(x) && std::isnan(to_float(back)));
      continue;
    }
    const double magnitude = exponent == 0      ? std::ldexp(fraction, -24)
                             : exponent == 0x1f ? HUGE_VAL
                                                : std::ldexp(1024 + fraction, int(exponent) - 25);
    ASSERT_EQ(x, bits >> 15 ? -magnitude : magnitude);
    ASSERT_EQ(back.bits, bits);
    if (exponent == 0x1f) continue;
    const double step = std::ldexp(1.0, std::max<int>(int(exponent), 1) - 25);
    const auto half_way = static_cast<float>(magnitude + step / 2);  // exact
    for (float y : {std::nextafter(half_way, 0.f), half_way, std::nextafter(half_way, kInfinity)}) {
      store(bits >> 15 ? -y : y, back);
      const bool up = y > half_way || (y == half_way && (bits & 1));
      ASSERT_EQ(back.bits, bits + (up ? 1 : 0)) << "bits " << bits << ", y " << y;
    }
  }
}

// The known answers of the authors' own test suite.
TEST(Philox, GivesThePublishedBits) {
  const auto expect = [](PhiloxCounter counter, PhiloxKey key, PhiloxCounter want) {
    const PhiloxCounter got = philox(counter, key);
    for (int i = 0; i < 4; ++i) EXPECT_EQ(got.word[i], want.word[i]) << "word " << i;
  };
  expect({{0, 0, 0, 0}}, {{0, 0}}, {{0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}});
  expect({{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff}}, {{0xffffffff, 0xffffffff}},
         {{0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}});
  expect({{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344}}, {{0xa4093822, 0x299f31d0}},
         {{0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}});
}

TEST(RoundingBits, UseAllOfSeedStepAndExpert) {
  // Key = seed, counter = (step, e), low words first.
  EXPECT_EQ(rounding_bits(0, 0, 0), 0x6627e8d5u);
  EXPECT_EQ(rounding_bits(0x299f31d0a4093822, static_cast<int64_t>(0x85a308d3243f6a88),
                          0x0370734413198a2e),
            0xd16cfe09u);
  const uint32_t base = rounding_bits(1, 2, 3);
  for (int bit = 0; bit < 63; ++bit) {
    EXPECT_NE(rounding_bits(1 ^ (int64_t{1} << bit), 2, 3), base) << "seed bit " << bit;
    EXPECT_NE(rounding_bits(1, 2 ^ (int64_t{1} << bit), 3), base) << "step bit " << bit;
    EXPECT_NE(rounding_bits(1, 2, 3 ^ (int64_t{1} << bit)), base) << "expert bit " << bit;
  }
}

TEST(RoundsUp, StochasticHasTheExactThreshold) {
  // remainder / m = 3 / 4: up for bits below 3 * 2^30.
  EXPECT_TRUE(rounds_up(TILEMOE_ROUND_STOCHASTIC, 3, 4, 0xBFFFFFFF));
  EXPECT_FALSE(rounds_up(TILEMOE_ROUND_STOCHASTIC, 3, 4, 0xC0000000));
  EXPECT_FALSE(rounds_up(TILEMOE_ROUND_STOCHASTIC, 0, 4, 0));
  const int64_t m = INT32_MAX;
  EXPECT_TRUE(rounds_up(TILEMOE_ROUND_STOCHASTIC, m - 1, m, 0xFFFFFFFD));
  EXPECT_FALSE(rounds_up(TILEMOE_ROUND_STOCHASTIC, m - 1, m, 0xFFFFFFFE));
  EXPECT_TRUE(rounds_up(TILEMOE_ROUND_STOCHASTIC, 1, m, 2));
  EXPECT_FALSE(rounds_up(TILEMOE_ROUND_STOCHASTIC, 1, m, 3));
}

}  // namespace
}  // namespace tilemoe
