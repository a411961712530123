// Calls of router_logits on any device, with guards around every array, and what each must give:
// exact sums of whole numbers, and a token's bits wherever it is in a batch.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <functional>
#include <vector>

#include "tilemoe/routing.h"
#include "verify/memory.h"
#include "verify/number.h"
#include "verify/random.h"

namespace tilemoe::test {

struct LogitsCase {
  int64_t T, E, d;
  DType x = DType::kBFloat16, weight = DType::kBFloat16, logits = DType::kFloat32;
  bool biased = false;
  bool padded = false;  // gaps between rows
};

inline std::ostream& operator<<(std::ostream& out, const LogitsCase& c) {
  return out << "T " << c.T << ", E " << c.E << ", d " << c.d << ", X " << static_cast<int>(c.x)
             << ", weight " << static_cast<int>(c.weight) << ", logits "
             << static_cast<int>(c.logits) << (c.biased ? ", bias" : "")
             << (c.padded ? ", padded" : "");
}

// A gate and its tokens on a device.
class LogitsProblem {
 public:
  using Value = std::function<double(int64_t row, int64_t column)>;

  LogitsProblem(verify::Memory& memory, const LogitsCase& of, const Value& x, const Value& weight,
                const Value& bias)
      : memory_(memory), case_(of) {
    x_ = values(of.x, of.T, of.d, x);
    weight_ = values(of.weight, of.E, of.d, weight);
    bias_ = values(DType::kFloat32, 1, of.E, bias);
  }

  // The bits of tokens [first, first + count), as a batch of their own.
  std::vector<float> logits(int64_t first, int64_t count) const {
    const verify::MatrixLayout layout{.padded = case_.padded};
    const auto [T, E, d, x_type, weight_type, type, biased, padded] = case_;
    verify::GuardedTensor X(memory_, x_type, {count, d}, layout),
        weight(memory_, weight_type, {E, d}, layout), bias(memory_, DType::kFloat32, {E}),
        logits(memory_, type, {count, E}, layout);
    X.write({x_.begin() + first * d, x_.begin() + (first + count) * d});
    weight.write(weight_);
    bias.write(bias_);
    const size_t bytes = router_logits_workspace_bytes(memory_.device(), count, E, d, weight_type);
    verify::GuardedBuffer workspace(memory_, bytes);
    router_logits({.device = memory_.device(),
                   .X = X.view(),
                   .weight = weight.view(),
                   .bias = biased ? ConstTensor(bias.view()) : ConstTensor(),
                   .logits = logits.view(),
                   .workspace = workspace.data(),
                   .workspace_bytes = bytes});
    EXPECT_TRUE(logits.gaps_intact() && workspace.guards_intact()) << case_;
    return logits.read();
  }

  // In double.
  double exact(int64_t t, int64_t e) const {
    double sum = case_.biased ? at(bias_, e) : 0.;
    for (int64_t k = 0; k < case_.d; ++k)
      sum += at(x_, t * case_.d + k) * at(weight_, e * case_.d + k);
    return sum;
  }
  // The sum of the absolute terms.
  double size(int64_t t, int64_t e) const {
    double sum = case_.biased ? std::fabs(at(bias_, e)) : 0.;
    for (int64_t k = 0; k < case_.d; ++k)
      sum += std::fabs(at(x_, t * case_.d + k) * at(weight_, e * case_.d + k));
    return sum;
  }

 private:
  static double at(const std::vector<float>& values, int64_t i) {
    return double{values[static_cast<size_t>(i)]};
  }
  // As the dtype has them.
  static std::vector<float> values(DType dtype, int64_t rows, int64_t columns, const Value& value) {
    std::vector<float> made;
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        made.push_back(static_cast<float>(verify::round_to(dtype, value(i, j))));
    return made;
  }

  verify::Memory& memory_;
  LogitsCase case_;
  std::vector<float> x_, weight_, bias_;
};

// Whole numbers, whose sums are exact in every order.
inline void expect_whole_logits(verify::Memory& memory, const LogitsCase& of) {
  verify::Random random(7, 1);
  const auto whole = [&](int64_t, int64_t) { return static_cast<double>(random.below(5)) - 2; };
  const LogitsProblem problem(memory, of, whole, whole, whole);
  const std::vector<float> logits = problem.logits(0, of.T);
  for (int64_t t = 0; t < of.T; ++t)
    for (int64_t e = 0; e < of.E; ++e)
      ASSERT_EQ(double{logits[static_cast<size_t>(t * of.E + e)]},
                verify::round_to(of.logits, problem.exact(t, e)))
          << of << ": token " << t << ", expert " << e;
}

// Each token picks one column of a weight whose numbers need all 24 bits.
inline void expect_whole_weights(verify::Memory& memory, const LogitsCase& of) {
  verify::Random random(8, 1);
  const LogitsProblem problem(
      memory, of, [&](int64_t t, int64_t k) { return t * 37 % of.d == k ? -2. : 0.; },
      [&](int64_t, int64_t) { return (random.uniform() - 0.5) * std::exp2(random.below(20)); },
      [](int64_t, int64_t) { return 0.; });
  const std::vector<float> logits = problem.logits(0, of.T);
  for (int64_t t = 0; t < of.T; ++t)
    for (int64_t e = 0; e < of.E; ++e)
      ASSERT_EQ(double{logits[static_cast<size_t>(t * of.E + e)]}, problem.exact(t, e))
          << of << ": token " << t << ", expert " << e;
}

// Normal numbers: near the exact sum, and equal bits for every batch that a token is in. `sizes`
// are the numbers of tokens of the smaller batches, from several places on.
inline void expect_same_bits(verify::Memory& memory, const LogitsCase& of,
                             const std::vector<int64_t>& sizes) {
  verify::Random random(9, 1);
  const auto normal = [&](int64_t, int64_t) { return random.normal(); };
  const LogitsProblem problem(memory, of, normal, normal, normal);
  const std::vector<float> all = problem.logits(0, of.T);
  const double unit = of.logits == DType::kFloat32   ? 0x1p-24
                      : of.logits == DType::kFloat16 ? 0x1p-11
                                                     : 0x1p-8;
  for (int64_t t = 0; t < of.T; t += 1 + of.T / 17)
    for (int64_t e = 0; e < of.E; ++e) {
      const double exact = problem.exact(t, e);
      const double error = std::fabs(double{all[static_cast<size_t>(t * of.E + e)]} - exact);
      ASSERT_LE(error, std::fabs(exact) * unit + problem.size(t, e) * 0x1p-19)
          << of << ": token " << t << ", expert " << e;
    }
  for (const int64_t count : sizes) {
    ASSERT_LE(count, of.T);
    for (const int64_t first : {int64_t{0}, (of.T - count) / 2, of.T - count}) {
      const std::vector<float> some = problem.logits(first, count);
      ASSERT_EQ(std::memcmp(some.data(), all.data() + first * of.E, some.size() * sizeof(float)), 0)
          << of << ": tokens " << first << " to " << first + count;
    }
  }
}

}  // namespace tilemoe::test
