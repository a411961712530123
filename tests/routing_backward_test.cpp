// The router's backward against central differences of the scores in float64.
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

using Row64 = std::vector<double>;

// The scores of experts `chosen` of one token, in float64, as functions of its logits.
Row64 scores64(Scoring scoring, const Row64& logits, const std::vector<int64_t>& chosen) {
  const auto sigmoid = [](double x) { return 1 / (1 + std::exp(-x)); };
  Row64 all(logits.size());
  double all_sum = 0;
  for (size_t e = 0; e < logits.size(); ++e)
    all_sum += all[e] = is_sigmoid(scoring) ? sigmoid(logits[e]) : std::exp(logits[e]);
  Row64 scores;
  double sum = 0;
  for (int64_t e : chosen) {
    scores.push_back(all[static_cast<size_t>(e)]);
    sum += scores.back();
  }
  if (scoring == Scoring::kSigmoid) return scores;
  for (double& score : scores) score /= scoring == Scoring::kSoftmaxOverAll ? all_sum : sum;
  return scores;
}

Row64 central_differences(const Row64& logits, const std::function<double(const Row64&)>& loss) {
  constexpr double kStep = 1e-5;
  Row64 gradient(logits.size());
  for (size_t e = 0; e < logits.size(); ++e) {
    Row64 above = logits, below = logits;
    above[e] += kStep, below[e] -= kStep;
    gradient[e] = (loss(above) - loss(below)) / (2 * kStep);
  }
  return gradient;
}

std::vector<float> random_vector(int64_t size, uint32_t seed) {
  return make_logits(Logits::kNormal, size, 1, seed);
}

// A routing from logits, its backward's arguments and the previous values of the caller's dlogits.
struct Problem {
  Matrix logits;
  Routed routed;
  std::vector<float> ds;
  std::vector<int64_t> ids;  // (T, K), top-K only
  float factor = 1;          // of every score

  // Chooses by the logits, and routes.
  void choose(Scoring scoring) {
    const int64_t T = routed.get().spec.T, K = routed.get().spec.K;
    std::vector<float> scores(ids.size());
    const Tensor chosen(ids.data(), DType::kInt64, {T, K});
    const Tensor s(scores.data(), DType::kFloat32, {T, K});
    top_k({.device = Device::kCpu,
           .scoring = scoring,
           .K = K,
           .logits = logits.tensor(),
           .ids = chosen,
           .scores = s,
           .routed_scaling_factor = factor});
    routed.route_top_k(chosen, s);
  }
};

std::unique_ptr<Problem> top_k_problem(Scoring scoring, DType dtype, int64_t T, int64_t E,
                                       int64_t K, int64_t capacity = 0, float factor = 1) {
  RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, T, E, K);
  spec.capacity = capacity;
  auto problem = std::unique_ptr<Problem>(new Problem{
      Matrix(make_logits(Logits::kNormal, T, E, 3), dtype, T, E, 3), Routed(spec),
      random_vector(T * K, 4), std::vector<int64_t>(static_cast<size_t>(T * K)), factor});
  problem->choose(scoring);
  const Routed& routed = problem->routed;
  for (size_t pair = 0; pair < problem->ds.size(); ++pair)  // a skipped pair's ds is not read
    if (routed.pair_rows()[pair] < 0) problem->ds[pair] = kNaN;
  return problem;
}

std::vector<float> backward(Scoring scoring, Problem& problem, Matrix& dlogits,
                            bool accumulate = false, bool with_logits = true) {
  problem.routed.backward(scoring, with_logits ? problem.logits.tensor() : Tensor(),
                          vector_of(problem.ds), dlogits.tensor(), accumulate, problem.factor);
  EXPECT_TRUE(dlogits.gaps_intact());
  return dlogits.values();
}

Row64 row64(const std::vector<float>& values, int64_t t, int64_t E) {
  return {values.begin() + t * E, values.begin() + (t + 1) * E};
}

// The gradient of a top-K routing. A pair that is skipped counts as absent: no gradient comes from
// it, and none reaches its logit through a softmax over the chosen.
Row64 top_k_gradient(Scoring scoring, Problem& problem, int64_t t) {
  const tilemoe_routing& routing = problem.routed.get();
  const int64_t E = routing.spec.E, K = routing.spec.K;
  const std::vector<int64_t> chosen(problem.ids.begin() + t * K, problem.ids.begin() + (t + 1) * K);
  Row64 gradient =
      central_differences(row64(problem.logits.values(), t, E), [&](const Row64& logits) {
        const Row64 scores = scores64(scoring, logits, chosen);
        double loss = 0;
        for (int64_t k = 0; k < K; ++k)
          if (routing.pair_row[t * K + k] >= 0)
            loss += problem.factor * scores[static_cast<size_t>(k)] *
                    problem.ds[static_cast<size_t>(t * K + k)];
        return loss;
      });
  if (scoring != Scoring::kSoftmaxOverAll)
    for (int64_t k = 0; k < K; ++k)
      if (routing.pair_row[t * K + k] < 0)
        gradient[static_cast<size_t>(chosen[static_cast<size_t>(k)])] = 0;
  return gradient;
}

// Half a unit in the last place of 1 of a stored type.
double rounding_of(DType dtype) {
  return dtype == DType::kFloat32 ? 0 : dtype == DType::kBFloat16 ? 0x1p-8 : 0x1p-11;
}

// `scale` is the scale of the terms whose sum is the gradient.
void expect_near(const std::vector<float>& got, int64_t t, const Row64& want, DType dtype,
                 const std::vector<float>& before, double scale = 1) {
  const auto E = static_cast<int64_t>(want.size());
  for (int64_t e = 0; e < E; ++e) {
    const auto at = static_cast<size_t>(t * E + e);
    const double total = want[static_cast<size_t>(e)] + (before.empty() ? 0 : before[at]);
    const double error = std::fabs(got[at] - total);
    ASSERT_TRUE(error <= 2e-6 * scale + 1.01 * rounding_of(dtype) * std::fabs(total))
        << "token " << t << ", expert " << e << ": " << got[at] << ", expected " << total;
  }
}

const DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

class TopKBackward : public testing::TestWithParam<Scoring> {};

TEST_P(TopKBackward, KnowsTheScoresFactor) {
  const int64_t T = 40, E = 20, K = 4;
  for (const float factor : {2.5f, 0.125f, -3.f}) {
    const auto problem = top_k_problem(GetParam(), DType::kFloat32, T, E, K, 150, factor);
    Matrix dlogits(DType::kFloat32, T, E);
    const std::vector<float> got = backward(GetParam(), *problem, dlogits);
    for (int64_t t = 0; t < T; ++t)
      expect_near(got, t, top_k_gradient(GetParam(), *problem, t), DType::kFloat32, {},
                  std::fabs(factor));
  }
}

TEST_P(TopKBackward, EqualsCentralDifferences) {
  for (const auto& [T, E, K] : {std::tuple<int64_t, int64_t, int64_t>{40, 9, 3},
                                {30, 5, 5},
                                {3, 1, 1},
                                {20, 70, 8},
                                {3, 1000, 4}}) {
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K);
    for (DType dtype : kDTypes)
      for (float beta : {0.f, 1.f}) {
        const auto problem = top_k_problem(GetParam(), dtype, T, E, K);
        for (DType out : {DType::kFloat32, dtype}) {
          Matrix dlogits(random_vector(T * E, 8), out, T, E, 5);
          const std::vector<float> before = beta != 0 ? dlogits.values() : std::vector<float>();
          const std::vector<float> got = backward(GetParam(), *problem, dlogits, beta);
          for (int64_t t = 0; t < T; ++t)
            expect_near(got, t, top_k_gradient(GetParam(), *problem, t), out, before);
        }
      }
  }
}

TEST_P(TopKBackward, CountsSkippedPairsAsAbsent) {
  const int64_t T = 30, E = 6, K = 3;
  const auto problem = top_k_problem(GetParam(), DType::kFloat32, T, E, K, 70);
  ASSERT_EQ(problem->routed.counter(TILEMOE_COUNT_OVER_CAPACITY), 20);
  Matrix dlogits(DType::kFloat32, T, E);
  const std::vector<float> got = backward(GetParam(), *problem, dlogits);
  for (int64_t t = 0; t < T; ++t)
    expect_near(got, t, top_k_gradient(GetParam(), *problem, t), DType::kFloat32, {});
}

TEST_P(TopKBackward, SpoilsTheRowOfATokenWithNaNAlone) {
  const int64_t T = 12, E = 40, K = 4;
  std::vector<std::vector<float>> results;
  for (bool spoiled : {false, true}) {
    auto problem = top_k_problem(GetParam(), DType::kFloat32, T, E, K);
    if (spoiled) {
      problem->logits.set(7, 0, kNaN);
      problem->choose(GetParam());
      for (int64_t k = 0; k < K; ++k) problem->ds[static_cast<size_t>(7 * K + k)] = kNaN;
    }
    Matrix dlogits(DType::kFloat32, T, E);
    results.push_back(backward(GetParam(), *problem, dlogits));
  }
  int nan = 0;
  for (size_t i = 0; i < results[0].size(); ++i) {
    if (static_cast<int64_t>(i) / E == 7)
      nan += std::isnan(results[1][i]) ? 1 : 0;
    else
      ASSERT_EQ(results[0][i], results[1][i]) << "element " << i;
  }
  EXPECT_GE(nan, K);
}

TEST_P(TopKBackward, TakesNoTokens) {
  const auto problem = top_k_problem(GetParam(), DType::kFloat32, 0, 4, 2);
  Matrix dlogits(DType::kFloat32, 0, 4);
  EXPECT_TRUE(backward(GetParam(), *problem, dlogits).empty());
}

INSTANTIATE_TEST_SUITE_P(, TopKBackward, testing::ValuesIn(kScorings),
                         [](const testing::TestParamInfo<Scoring>& each) {
                           return "Scoring" + std::to_string(static_cast<int>(each.param));
                         });

// If the gradient follows from the scores alone, the logits may be absent, and change nothing.
TEST(SoftmaxOverChosenBackward, NeedsNoLogits) {
  const int64_t T = 25, E = 12, K = 3;
  for (Scoring scoring : {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxRenormalized}) {
    const auto problem = top_k_problem(scoring, DType::kFloat32, T, E, K);
    Matrix with(DType::kFloat32, T, E), without(DType::kFloat32, T, E);
    EXPECT_EQ(bits_of(backward(scoring, *problem, with)),
              bits_of(backward(scoring, *problem, without, 0, false)));
  }
}

// The gradient of equal scores among infinite logits; experts with score 0 get none.
TEST(SoftmaxBackward, IsFiniteWhereLogitsAreInfinite) {
  const int64_t T = 3, E = 4, K = 2;
  const std::vector<float> rows = {kInfinity,  kInfinity,  1,          2,           //
                                   -kInfinity, -kInfinity, -kInfinity, -kInfinity,  //
                                   1,          -kInfinity, -kInfinity, -kInfinity};
  for (Scoring scoring : {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxOverAll}) {
    auto problem = top_k_problem(scoring, DType::kFloat32, T, E, K);
    for (int64_t i = 0; i < T * E; ++i) problem->logits.set(i / E, i % E, rows[size_t(i)]);
    problem->choose(scoring);
    problem->ds = {1, 3, 1, 3, 1, 3};
    Matrix dlogits(DType::kFloat32, T, E);
    const std::vector<float> got = backward(scoring, *problem, dlogits);
    const std::vector<float> want =
        scoring == Scoring::kSoftmaxOverChosen
            ? std::vector<float>{-0.5, 0.5, 0, 0, -0.5, 0.5, 0, 0,  //
                                 0,    0,   0, 0}
            : std::vector<float>{-0.5, 0.5, 0, 0, 0, 0.5, -0.25, -0.25, 0, 0, 0, 0};
    for (size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], want[i]) << "element " << i;
  }
}

class RoundedBackward : public testing::TestWithParam<Rounding> {};

TEST_P(RoundedBackward, EqualsCentralDifferences) {
  struct Shape {
    int64_t T, E, K, m, capacity, round_tokens = 0;
  };
  for (const auto& [T, E, K, m, capacity, round_tokens] : {Shape{60, 7, 2, 8, 0},
                                                           {40, 5, 5, 16, 0},
                                                           {30, 40, 3, 4, 0},
                                                           {3, 6, 2, 4, 0},
                                                           {60, 7, 2, 8, 77},
                                                           {100, 1, 1, 16, 0},
                                                           {20, 9, 4, 1, 0},
                                                           {60, 7, 2, 8, 0, 20},
                                                           {60, 7, 2, 8, 77, 15}})
    for (DType dtype : {DType::kFloat32, DType::kBFloat16}) {
      SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K << ", m " << m
                                      << ", round_tokens " << round_tokens);
      RoutingSpec spec = RoutingSpec::rounded(Device::kCpu, T, E, K, GetParam(), m, round_tokens);
      spec.capacity = capacity;
      Problem problem{Matrix(make_logits(Logits::kSkewed, T, E, 6), dtype, T, E, 2),
                      Routed(spec),
                      random_vector(spec.bound(), 7),
                      {}};
      problem.routed.round(problem.logits.tensor(), 1, 2);
      const tilemoe_routing& routing = problem.routed.get();
      for (int64_t pair = routing.token_offsets[T]; pair < routing.spec.pairs; ++pair)
        problem.ds[static_cast<size_t>(pair)] = kNaN;  // never read
      const std::vector<float> values = problem.logits.values();
      Matrix dlogits(DType::kFloat32, T, E, 1);
      const std::vector<float> got = backward(Scoring::kSoftmaxRenormalized, problem, dlogits);
      for (int64_t t = 0; t < T; ++t) {
        const std::vector<int32_t> sorted = sorted_descending(row_of_logits(values, t, E));
        const std::vector<int64_t> chosen(sorted.begin(), sorted.begin() + K);
        const auto loss = [&](const Row64& logits) {
          const Row64 scores = scores64(Scoring::kSoftmaxRenormalized, logits, chosen);
          double sum = 0;
          for (int32_t p = routing.token_offsets[t]; p < routing.token_offsets[t + 1]; ++p) {
            const int64_t e = problem.routed.expert_of(routing.pair_row[p]);
            const auto at = std::find(chosen.begin(), chosen.end(), e) - chosen.begin();
            const double score = at < K ? scores[static_cast<size_t>(at)]
                                        : scores64(Scoring::kSoftmaxOverAll, logits, {e})[0];
            sum += score * problem.ds[static_cast<size_t>(p)];
          }
          return sum;
        };
        expect_near(got, t, central_differences(row64(values, t, E), loss), DType::kFloat32, {});
      }
    }
}

INSTANTIATE_TEST_SUITE_P(, RoundedBackward,
                         testing::Values(Rounding::kNearest, Rounding::kUp, Rounding::kDown,
                                         Rounding::kStochastic, Rounding::kBalanced),
                         [](const testing::TestParamInfo<Rounding>& each) {
                           return "Rule" + std::to_string(static_cast<int>(each.param));
                         });

}  // namespace
}  // namespace tilemoe::routing_test
