// The balance loss and the z-loss, and their gradient, in float64 from the definitions.
#include <gtest/gtest.h>

#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

struct Losses {
  double balance = 0, z = 0;
};

// Computed from logits (T, E) in float64; tokens with a NaN are left out.
Losses losses64(const std::vector<double>& logits, const std::vector<int32_t>& counts) {
  const size_t E = counts.size(), T = logits.size() / E;
  std::vector<double> mean(E, 0);
  double z = 0, tokens = 0, choices = 0;
  for (int32_t count : counts) choices += count;
  for (size_t t = 0; t < T; ++t) {
    double sum = 0;
    for (size_t e = 0; e < E; ++e) sum += std::exp(logits[t * E + e]);
    if (std::isnan(sum)) continue;
    for (size_t e = 0; e < E; ++e) mean[e] += std::exp(logits[t * E + e]) / sum;
    z += std::log(sum) * std::log(sum);
    ++tokens;
  }
  Losses losses;
  if (tokens == 0) return losses;
  for (size_t e = 0; e < E && choices > 0; ++e)
    losses.balance += static_cast<double>(E) * counts[e] / choices * mean[e] / tokens;
  losses.z = z / tokens;
  return losses;
}

std::vector<int32_t> random_counts(int64_t E, uint32_t seed) {
  std::mt19937 random(seed);
  std::vector<int32_t> counts(static_cast<size_t>(E));
  for (int32_t& count : counts) count = static_cast<int32_t>(random() % 100);
  counts[0] += 1;
  return counts;
}

Losses call(Matrix& logits, const std::vector<int32_t>& counts, float balance_coefficient = 0,
            float z_coefficient = 0, const Tensor& dlogits = {}) {
  const Tensor view = logits.tensor();
  Guarded workspace(router_losses_workspace_bytes(Device::kCpu, view.shape[0], view.shape[1]));
  std::vector<float> losses(3, -7.f);
  router_losses({.device = Device::kCpu,
                 .balance_coefficient = balance_coefficient,
                 .z_coefficient = z_coefficient,
                 .logits = view,
                 .expert_counts = vector_of(counts),
                 .losses = {losses.data(), DType::kFloat32, {2}},
                 .dlogits = dlogits,
                 .workspace = workspace.data(),
                 .workspace_bytes = workspace.bytes()});
  EXPECT_EQ(losses[2], -7.f);
  return {losses[0], losses[1]};
}

void expect_close(double got, double want, double tolerance) {
  EXPECT_TRUE(std::fabs(got - want) <= tolerance * std::fabs(want)) << got << ", expected " << want;
}

TEST(RouterLosses, EqualTheDefinitions) {
  for (const auto& [T, E] :
       {std::pair<int64_t, int64_t>{1, 1}, {1, 7}, {50, 8}, {3000, 33}, {70, 500}})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
      SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E);
      Matrix logits(make_logits(Logits::kSkewed, T, E, 2), dtype, T, E, 3);
      const std::vector<float> values = logits.values();
      const std::vector<int32_t> counts = random_counts(E, 5);
      const Losses got = call(logits, counts);
      const Losses want = losses64({values.begin(), values.end()}, counts);
      expect_close(got.balance, want.balance, 2e-6);
      expect_close(got.z, want.z, 2e-6);
    }
}

// A token with a NaN is in neither mean, whichever block it falls into.
TEST(RouterLosses, LeaveTokensWithANaNOut) {
  for (const auto& [T, E] : {std::pair<int64_t, int64_t>{5, 3}, {50, 8}, {3000, 33}}) {
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E);
    Matrix logits(make_logits(Logits::kNormal, T, E, 2), DType::kFloat32, T, E);
    for (int64_t t = 0; t < T; t += 3) logits.set(t, t % E, kNaN);
    const std::vector<float> values = logits.values();
    const std::vector<int32_t> counts = random_counts(E, 5);
    const Losses got = call(logits, counts);
    const Losses want = losses64({values.begin(), values.end()}, counts);
    expect_close(got.balance, want.balance, 2e-6);
    expect_close(got.z, want.z, 2e-6);
  }
}

TEST(RouterLosses, AddTheGradientOfCentralDifferences) {
  const int64_t T = 20, E = 9;
  const float balance_coefficient = 0.7f, z_coefficient = 0.3f;
  Matrix logits(make_logits(Logits::kNormal, T, E, 3), DType::kFloat32, T, E, 1);
  logits.set(4, 2, kNaN);
  const std::vector<float> values = logits.values();
  const std::vector<int32_t> counts = random_counts(E, 6);
  const std::vector<float> before = make_logits(Logits::kNormal, T, E, 9);
  Matrix dlogits(before, DType::kFloat32, T, E, 2);
  call(logits, counts, balance_coefficient, z_coefficient, dlogits.tensor());
  EXPECT_TRUE(dlogits.gaps_intact());
  const std::vector<float> got = dlogits.values();
  const std::vector<double> exact(values.begin(), values.end());
  for (size_t i = 0; i < exact.size(); ++i) {
    if (static_cast<int64_t>(i) / E == 4) {
      ASSERT_EQ(got[i], before[i]) << "a token with a NaN is left out";
      continue;
    }
    constexpr double kStep = 1e-5;
    const auto loss = [&](double step) {
      std::vector<double> moved = exact;
      moved[i] += step;
      const Losses losses = losses64(moved, counts);
      return balance_coefficient * losses.balance + z_coefficient * losses.z;
    };
    const double gradient = (loss(kStep) - loss(-kStep)) / (2 * kStep);
    ASSERT_TRUE(std::fabs(got[i] - before[i] - gradient) <= 3e-7)
        << "element " << i << ": " << got[i] - before[i] << ", expected " << gradient;
  }
}

TEST(RouterLosses, RoundTheSumOnceInSixteenBits) {
  const int64_t T = 10, E = 6;
  for (DType dtype : {DType::kBFloat16, DType::kFloat16}) {
    Matrix logits(make_logits(Logits::kNormal, T, E, 3), dtype, T, E);
    const std::vector<int32_t> counts = random_counts(E, 6);
    Matrix wide(make_logits(Logits::kTies, T, E, 9), DType::kFloat32, T, E);
    Matrix narrow(wide.values(), dtype, T, E);
    call(logits, counts, 1.f, 1.f, wide.tensor());
    call(logits, counts, 1.f, 1.f, narrow.tensor());
    Matrix want(wide.values(), dtype, T, E);
    EXPECT_EQ(narrow.values(), want.values());
  }
}

TEST(RouterLosses, AreOneWhenBalancedAndZeroWithoutChoices) {
  const int64_t T = 64, E = 16;
  Matrix logits(std::vector<float>(static_cast<size_t>(T * E), 0.5f), DType::kFloat32, T, E);
  expect_close(call(logits, std::vector<int32_t>(static_cast<size_t>(E), 8)).balance, 1, 1e-6);
  EXPECT_EQ(call(logits, std::vector<int32_t>(static_cast<size_t>(E), 0)).balance, 0);
  Matrix none(DType::kFloat32, 0, E);
  const Losses empty = call(none, std::vector<int32_t>(static_cast<size_t>(E), 8));
  EXPECT_EQ(empty.balance, 0);
  EXPECT_EQ(empty.z, 0);
}

// Experts masked with -inf weigh nothing and get no gradient; a token without any finite logit has
// an infinite z, and without the z-loss no NaN results.
TEST(RouterLosses, TakeInfiniteLogits) {
  const int64_t T = 2, E = 3;
  Matrix logits({1, -kInfinity, 2, -kInfinity, -kInfinity, -kInfinity}, DType::kFloat32, T, E);
  Matrix dlogits(std::vector<float>(6, 0.f), DType::kFloat32, T, E);
  const std::vector<int32_t> counts = {1, 1, 4};
  EXPECT_EQ(call(logits, counts, 1.f, 0.f, dlogits.tensor()).z, kInfinity);
  const std::vector<float> gradient = dlogits.values();
  EXPECT_FALSE(has_nan(gradient));
  EXPECT_EQ(gradient[1], 0.f);
  EXPECT_LT(gradient[0], 0.f);
  EXPECT_GT(gradient[2], 0.f);

  Matrix finite({1, -kInfinity, 2}, DType::kFloat32, 1, E);
  Matrix with_z(std::vector<float>(3, 0.f), DType::kFloat32, 1, E);
  const Losses losses = call(finite, counts, 0.f, 1.f, with_z.tensor());
  const double log_sum_exp = std::log(std::exp(1.0) + std::exp(2.0));
  expect_close(losses.z, log_sum_exp * log_sum_exp, 1e-6);
  EXPECT_EQ(with_z.get(0, 1), 0.f);
  expect_close(with_z.get(0, 2), 2 * log_sum_exp / (1 + std::exp(-1.0)), 1e-6);

  Matrix infinite({kInfinity, 1, kInfinity}, DType::kFloat32, 1, E);
  Matrix logits_gradient(std::vector<float>(3, 0.f), DType::kFloat32, 1, E);
  EXPECT_EQ(call(infinite, counts, 1.f, 1.f, logits_gradient.tensor()).z, kInfinity);
  EXPECT_EQ(logits_gradient.get(0, 0), kInfinity);
  EXPECT_EQ(logits_gradient.get(0, 1), 0.f);  // p is 0, and the log infinite
}

TEST(RouterLosses, WriteNoLossesWhereNoneAreWanted) {
  const int64_t T = 30, E = 5;
  Matrix logits(make_logits(Logits::kNormal, T, E, 3), DType::kFloat32, T, E);
  const std::vector<int32_t> counts = random_counts(E, 1);
  Matrix with(std::vector<float>(150, 0.f), DType::kFloat32, T, E), without = with;
  call(logits, counts, 1.f, 1.f, with.tensor());
  Guarded workspace(router_losses_workspace_bytes(Device::kCpu, T, E));
  router_losses({.device = Device::kCpu,
                 .balance_coefficient = 1,
                 .z_coefficient = 1,
                 .logits = logits.tensor(),
                 .expert_counts = vector_of(counts),
                 .dlogits = without.tensor(),
                 .workspace = workspace.data(),
                 .workspace_bytes = workspace.bytes()});
  EXPECT_EQ(with.values(), without.values());
}

}  // namespace
}  // namespace tilemoe::routing_test
