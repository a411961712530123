// Top-K of every scoring, of all experts and of groups, against a full sort and float64 scores; and
// the scores of ids that were chosen elsewhere.
#include <gtest/gtest.h>

#include <numeric>

#include "routing/groups.h"
#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

struct Choice {
  std::vector<int64_t> ids;   // (T, K)
  std::vector<float> scores;  // (T, K)
  std::vector<int32_t> counts;
};

struct Groups {
  int64_t count = 0, chosen = 0;
  GroupScore score = GroupScore::kTop2Sum;
  float factor = 1;
};

template <class Id>
Choice choose(Scoring scoring, Matrix& logits, int64_t K, const std::vector<float>& bias,
              const Groups& groups = {}) {
  const Tensor view = logits.tensor();
  const int64_t T = view.shape[0], E = view.shape[1];
  const auto pairs = static_cast<size_t>(T * K);
  std::vector<Id> ids(pairs + 8, -77);
  std::vector<float> scores(pairs + 8, -77.f);
  std::vector<int32_t> counts(static_cast<size_t>(E) + 1, -77);
  const DType id_type = sizeof(Id) == 4 ? DType::kInt32 : DType::kInt64;
  top_k({.device = Device::kCpu,
         .scoring = scoring,
         .K = K,
         .logits = view,
         .selection_bias = bias.empty() ? ConstTensor() : vector_of(bias),
         .ids = {ids.data(), id_type, {T, K}},
         .scores = {scores.data(), DType::kFloat32, {T, K}},
         .expert_counts = {counts.data(), DType::kInt32, {E}},
         .n_group = groups.count,
         .topk_group = groups.chosen,
         .group_score = groups.score,
         .routed_scaling_factor = groups.factor});
  EXPECT_EQ(ids[pairs], -77);
  EXPECT_EQ(scores[pairs], -77.f);
  EXPECT_EQ(counts.back(), -77);
  return {{ids.begin(), ids.begin() + static_cast<int64_t>(pairs)},
          {scores.begin(), scores.begin() + static_cast<int64_t>(pairs)},
          {counts.begin(), counts.end() - 1}};
}

// The values that rank a token's experts.
std::vector<float> ranking(Scoring scoring, std::vector<float> row,
                           const std::vector<float>& bias) {
  if (!is_sigmoid(scoring)) return row;
  for (size_t e = 0; e < row.size(); ++e)
    row[e] = order::sigmoid(row[e]) + (bias.empty() ? 0.f : bias[e]);
  return row;
}

// Scores of the chosen in float64, from the definitions.
std::vector<double> scores64(Scoring scoring, const std::vector<float>& row,
                             const std::vector<int32_t>& chosen) {
  const size_t K = chosen.size();
  std::vector<double> scores(K);
  std::vector<float> logits(K);
  for (size_t k = 0; k < K; ++k) logits[k] = row[static_cast<size_t>(chosen[k])];
  const std::vector<double> over_all = softmax64(row);
  double sum = 0;
  switch (scoring) {
    case Scoring::kSoftmaxOverChosen: return softmax64(logits);
    case Scoring::kSoftmaxOverAll:
    case Scoring::kSoftmaxRenormalized:
      for (size_t k = 0; k < K; ++k) sum += scores[k] = over_all[static_cast<size_t>(chosen[k])];
      break;
    case Scoring::kSigmoid:
    case Scoring::kSigmoidRenormalized:
      for (size_t k = 0; k < K; ++k) sum += scores[k] = sigmoid64(logits[k]);
      break;
  }
  const bool renormalized =
      scoring == Scoring::kSoftmaxRenormalized || scoring == Scoring::kSigmoidRenormalized;
  if (renormalized)
    for (double& score : scores) score = sum > 0 ? score / sum : 1.0 / static_cast<double>(K);
  return scores;
}

void expect_choice(Scoring scoring, const std::vector<float>& logits, int64_t T, int64_t E,
                   int64_t K, const std::vector<float>& bias, const Choice& got) {
  std::vector<int32_t> counts(static_cast<size_t>(E), 0);
  // Roundings: the difference to the largest, exp and the division, then a lane's terms.
  const double tolerance = std::ldexp(16 + static_cast<double>(E) / 32, -24);
  for (int64_t t = 0; t < T; ++t) {
    const std::vector<float> row = row_of_logits(logits, t, E);
    std::vector<int32_t> want = sorted_descending(ranking(scoring, row, bias));
    want.resize(static_cast<size_t>(K));
    const bool nan = has_nan(row);
    const std::vector<double> scores =
        nan ? std::vector<double>(static_cast<size_t>(K)) : scores64(scoring, row, want);
    for (int64_t k = 0; k < K; ++k) {
      const auto pair = static_cast<size_t>(t * K + k);
      const auto slot = static_cast<size_t>(k);
      ASSERT_EQ(got.ids[pair], want[slot]) << "token " << t << ", slot " << k;
      ++counts[static_cast<size_t>(want[slot])];
      const double error = std::fabs(got.scores[pair] - scores[slot]);
      if (nan)
        ASSERT_TRUE(std::isnan(got.scores[pair])) << "token " << t << ", slot " << k;
      else  // the last term is for subnormal scores
        ASSERT_TRUE(error <= tolerance * scores[slot] + 1e-44)
            << "token " << t << ", slot " << k << ": " << got.scores[pair] << ", expected "
            << scores[slot];
    }
  }
  EXPECT_EQ(got.counts, counts);
}

struct Shape {
  int64_t T, E, K;
};
const Shape kShapes[] = {{0, 5, 2},     {1, 1, 1},   {3, 2, 2},    {17, 7, 7},
                         {100, 32, 4},  {65, 33, 1}, {40, 31, 31}, {9, 64, 64},
                         {30, 100, 37}, {300, 8, 2}, {5, 4096, 8}, {2, 4096, 4096}};

using Parameter = std::tuple<Scoring, Logits>;
class TopK : public testing::TestWithParam<Parameter> {
 protected:
  Scoring scoring() const { return std::get<0>(GetParam()); }
  Logits kind() const { return std::get<1>(GetParam()); }
};

TEST_P(TopK, EqualsAFullSort) {
  for (const auto& [T, E, K] : kShapes) {
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K);
    const std::vector<float> values = make_logits(kind(), T, E);
    Matrix logits(values, DType::kFloat32, T, E);
    expect_choice(scoring(), values, T, E, K, {}, choose<int32_t>(scoring(), logits, K, {}));
  }
}

TEST_P(TopK, ReadsEveryTypeAndStride) {
  const int64_t T = 50, E = 37, K = 5;
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (int64_t gap : {0, 1, 11}) {
      SCOPED_TRACE(testing::Message() << tilemoe_dtype_name(to_c(dtype)) << ", stride " << E + gap);
      Matrix logits(make_logits(kind(), T, E, 5), dtype, T, E, gap);
      expect_choice(scoring(), logits.values(), T, E, K, {},
                    choose<int64_t>(scoring(), logits, K, {}));
    }
}

std::string test_name(const testing::TestParamInfo<Parameter>& info) {
  return std::string(name(std::get<1>(info.param))) +
         std::to_string(static_cast<int>(std::get<0>(info.param)));
}
INSTANTIATE_TEST_SUITE_P(, TopK,
                         testing::Combine(testing::ValuesIn(kScorings),
                                          testing::Values(Logits::kNormal, Logits::kTies,
                                                          Logits::kSpecial, Logits::kSkewed)),
                         test_name);

TEST(TopKWithBias, RanksBySigmoidPlusBias) {
  const int64_t T = 100, E = 19;
  std::vector<float> bias = make_logits(Logits::kNormal, 1, E, 9);
  bias[3] = kInfinity, bias[4] = -kInfinity, bias[5] = kNaN;
  for (int64_t K : {1, 4, 5, 8, 16, 19})
    for (Scoring scoring : {Scoring::kSigmoid, Scoring::kSigmoidRenormalized})
      for (Logits kind : {Logits::kNormal, Logits::kTies, Logits::kSpecial}) {
        SCOPED_TRACE(testing::Message() << name(kind) << ", K " << K);
        const std::vector<float> values = make_logits(kind, T, E, 3);
        Matrix logits(values, DType::kFloat32, T, E);
        expect_choice(scoring, values, T, E, K, bias, choose<int32_t>(scoring, logits, K, bias));
      }
}

// Every row of 4 logits out of NaN, -inf, -1, 0, -0, 1, inf, for every K.
TEST(TopKOfEveryRow, EqualsAFullSort) {
  const float values[] = {kNaN, -kInfinity, -1.f, 0.f, -0.f, 1.f, kInfinity};
  const int64_t E = 4, T = 7 * 7 * 7 * 7;
  std::vector<float> rows;
  for (int64_t t = 0; t < T; ++t)
    for (int64_t code = t, e = 0; e < E; ++e, code /= 7) rows.push_back(values[code % 7]);
  Matrix logits(rows, DType::kFloat32, T, E);
  for (Scoring scoring : kScorings)
    for (int64_t K = 1; K <= E; ++K) {
      SCOPED_TRACE(testing::Message() << "scoring " << static_cast<int>(scoring) << ", K " << K);
      expect_choice(scoring, rows, T, E, K, {}, choose<int32_t>(scoring, logits, K, {}));
    }
}

TEST(TopKWithNaN, ChangesNoBitOfAnotherToken) {
  const int64_t T = 64, E = 40, K = 6;
  const std::vector<float> clean = make_logits(Logits::kNormal, T, E);
  for (Scoring scoring : kScorings) {
    Matrix logits(clean, DType::kFloat32, T, E);
    const Choice before = choose<int32_t>(scoring, logits, K, {});
    logits.set(20, 39, kNaN);
    const Choice after = choose<int32_t>(scoring, logits, K, {});
    for (int64_t t = 0; t < T; ++t)
      for (auto pair = static_cast<size_t>(t * K); pair < static_cast<size_t>((t + 1) * K);
           ++pair) {
        if (t == 20) {
          EXPECT_TRUE(std::isnan(after.scores[pair]));
        } else {
          EXPECT_EQ(after.ids[pair], before.ids[pair]);
          EXPECT_EQ(after.scores[pair], before.scores[pair]);
        }
      }
  }
}

TEST(TopKScores, SumToOneWhereTheyAreRenormalized) {
  const int64_t T = 500, E = 64, K = 8;
  Matrix logits(make_logits(Logits::kNormal, T, E), DType::kFloat32, T, E);
  for (Scoring scoring : {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxRenormalized,
                          Scoring::kSigmoidRenormalized}) {
    const Choice choice = choose<int32_t>(scoring, logits, K, {});
    for (int64_t t = 0; t < T; ++t) {
      const auto first = choice.scores.begin() + t * K;
      EXPECT_NEAR(std::accumulate(first, first + K, 0.0), 1.0, 5e-7);
    }
  }
}

// Equal numbers under equal names: a softmax over all, renormalised, is the softmax over the
// chosen.
TEST(TopKScores, OfBothRenormalizedSoftmaxesAreTheSameBits) {
  const int64_t T = 200, E = 48, K = 5;
  Matrix logits(make_logits(Logits::kSpecial, T, E), DType::kFloat32, T, E);
  EXPECT_EQ(bits_of(choose<int32_t>(Scoring::kSoftmaxOverChosen, logits, K, {}).scores),
            bits_of(choose<int32_t>(Scoring::kSoftmaxRenormalized, logits, K, {}).scores));
}

// ------------------------------------------------------------------ groups

struct Case {
  int64_t T, E, K, n_group, topk_group;
  Scoring scoring = Scoring::kSigmoidRenormalized;
  GroupScore group_score = GroupScore::kTop2Sum;
  float factor = 1;
};

Choice choose(const Case& c, Matrix& logits, const std::vector<float>& bias) {
  return choose<int32_t>(c.scoring, logits, c.K, bias,
                         {c.n_group, c.topk_group, c.group_score, c.factor});
}

// The experts of the best groups, best first, then the others in their order.
std::vector<int32_t> sorted_in_groups(const Case& c, std::vector<float> ranking) {
  const int64_t size = c.E / c.n_group;
  std::vector<float> worth;
  for (int64_t g = 0; g < c.n_group; ++g) {
    std::vector<float> group(ranking.begin() + g * size, ranking.begin() + (g + 1) * size);
    for (float& x : group)
      if (std::isnan(x)) x = -kInfinity;
    std::sort(group.begin(), group.end(), std::greater<>());
    worth.push_back(c.group_score == GroupScore::kMax ? group[0] : group[0] + group[1]);
  }
  std::vector<int32_t> groups = sorted_descending(worth);
  for (size_t i = static_cast<size_t>(c.topk_group); i < groups.size(); ++i)
    std::fill_n(ranking.begin() + groups[i] * size, size, kNaN);
  return sorted_descending(ranking);
}

constexpr Case kCases[] = {
    {60, 256, 8, 8, 4},  {60, 160, 6, 8, 3},   {40, 64, 4, 32, 7}, {40, 12, 6, 3, 2},
    {40, 12, 12, 3, 3},  {40, 100, 11, 5, 2},  {9, 6, 1, 3, 1},    {9, 1024, 40, 16, 3},
    {5, 4096, 8, 32, 2}, {20, 300, 150, 2, 1}, {0, 8, 2, 4, 2},    {30, 30, 2, 15, 1},
};

class GroupLimited : public testing::TestWithParam<Logits> {};

TEST_P(GroupLimited, EqualsAFullSort) {
  for (Case c : kCases)
    for (const Scoring scoring :
         {Scoring::kSoftmaxOverAll, Scoring::kSigmoid, Scoring::kSigmoidRenormalized})
      for (const GroupScore group_score : {GroupScore::kTop2Sum, GroupScore::kMax}) {
        if (group_score == GroupScore::kTop2Sum && !is_sigmoid(scoring)) continue;
        c.scoring = scoring, c.group_score = group_score;
        SCOPED_TRACE(testing::Message() << "E " << c.E << ", K " << c.K << ", groups " << c.n_group
                                        << ", scoring " << static_cast<int>(scoring));
        const std::vector<float> values = make_logits(GetParam(), c.T, c.E);
        const std::vector<float> bias =
            is_sigmoid(scoring) ? make_logits(Logits::kNormal, 1, c.E, 4) : std::vector<float>();
        Matrix logits(values, DType::kFloat32, c.T, c.E);
        const Choice got = choose(c, logits, bias);
        std::vector<int32_t> counts(static_cast<size_t>(c.E));
        for (int64_t t = 0; t < c.T; ++t) {
          std::vector<float> ranking = row_of_logits(values, t, c.E);
          if (is_sigmoid(scoring))
            for (size_t e = 0; e < ranking.size(); ++e)
              ranking[e] = order::sigmoid(ranking[e]) + bias[e];
          const std::vector<int32_t> want = sorted_in_groups(c, ranking);
          for (int64_t k = 0; k < c.K; ++k) {
            const int64_t id = got.ids[static_cast<size_t>(t * c.K + k)];
            ASSERT_EQ(id, want[static_cast<size_t>(k)]) << "token " << t << ", slot " << k;
            ++counts[static_cast<size_t>(id)];
          }
        }
        EXPECT_EQ(got.counts, counts);
      }
}

INSTANTIATE_TEST_SUITE_P(, GroupLimited,
                         testing::Values(Logits::kNormal, Logits::kTies, Logits::kSpecial,
                                         Logits::kSkewed),
                         [](const auto& each) { return name(each.param); });

TEST(GroupLimitedScores, AreThoseOfTheChosenTimesTheFactor) {
  for (const Scoring scoring : kScorings)
    for (const float factor : {1.f, 2.5f}) {
      const Case c{50, 96, 6, 8, 3, scoring, GroupScore::kMax, factor};
      const std::vector<float> values = make_logits(Logits::kNormal, c.T, c.E);
      Matrix logits(values, DType::kFloat32, c.T, c.E);
      const Choice got = choose(c, logits, {});
      for (int64_t t = 0; t < c.T; ++t) {
        std::vector<float> chosen;
        for (int64_t k = 0; k < c.K; ++k)
          chosen.push_back(
              values[static_cast<size_t>(t * c.E + got.ids[static_cast<size_t>(t * c.K + k)])]);
        double sum = 0, all = 0;
        const auto weight = [&](float x) {
          return is_sigmoid(scoring) ? 1 / (1 + std::exp(-double{x})) : std::exp(double{x});
        };
        for (const float x : chosen) sum += weight(x);
        for (int64_t e = 0; e < c.E; ++e) all += weight(values[static_cast<size_t>(t * c.E + e)]);
        for (int64_t k = 0; k < c.K; ++k) {
          const double share = weight(chosen[static_cast<size_t>(k)]) /
                               (scoring == Scoring::kSigmoid          ? 1
                                : scoring == Scoring::kSoftmaxOverAll ? all
                                                                      : sum);
          EXPECT_NEAR(got.scores[static_cast<size_t>(t * c.K + k)], factor * share,
                      20 * 0x1p-24 * factor * share);
        }
      }
    }
}

// topk_group = n_group: the choice and the bits of a choice without groups.
TEST(GroupLimitedScores, OfAllGroupsAreThoseOfNone) {
  Case c{50, 96, 6, 8, 8};
  Matrix logits(make_logits(Logits::kNormal, c.T, c.E), DType::kBFloat16, c.T, c.E);
  const Choice limited = choose(c, logits, {});
  c.n_group = c.topk_group = 0;
  const Choice free = choose(c, logits, {});
  EXPECT_EQ(limited.ids, free.ids);
  EXPECT_EQ(bits_of(limited.scores), bits_of(free.scores));
}

// ------------------------------------------------------------------ given ids

Choice score(Scoring scoring, Matrix& logits, const std::vector<int64_t>& ids, int64_t K,
             float factor) {
  const Tensor view = logits.tensor();
  const int64_t T = view.shape[0], E = view.shape[1];
  Choice choice{ids, std::vector<float>(ids.size(), -77.f),
                std::vector<int32_t>(static_cast<size_t>(E))};
  top_k_scores({.device = Device::kCpu,
                .scoring = scoring,
                .routed_scaling_factor = factor,
                .logits = view,
                .ids = {choice.ids.data(), DType::kInt64, {T, K}},
                .scores = {choice.scores.data(), DType::kFloat32, {T, K}},
                .expert_counts = {choice.counts.data(), DType::kInt32, {E}}});
  return choice;
}

TEST(GivenIds, HaveTheBitsOfTheirOwnChoice) {
  for (const Logits kind : {Logits::kNormal, Logits::kTies, Logits::kSpecial})
    for (const DType dtype : {DType::kFloat32, DType::kBFloat16})
      for (const Scoring scoring : kScorings)
        for (const auto& [E, K] : {std::pair<int64_t, int64_t>{40, 6}, {5, 5}, {300, 70}}) {
          const Case c{33, E, K, 1, 1, scoring, GroupScore::kMax, 2.5f};
          Matrix logits(make_logits(kind, c.T, E), dtype, c.T, E, 3);
          const Choice chosen = choose(c, logits, {});
          const Choice given = score(scoring, logits, chosen.ids, K, 2.5f);
          EXPECT_EQ(bits_of(given.scores), bits_of(chosen.scores))
              << name(kind) << ", scoring " << static_cast<int>(scoring) << ", E " << E;
          EXPECT_EQ(given.counts, chosen.counts);
        }
}

TEST(GivenIds, AreAbsentOutsideTheExperts) {
  const int64_t T = 3, E = 4, K = 4;
  const std::vector<float> rows = {1, 2, 3, 4, 5, 6, 7, 8, 0, 0, kNaN, 0};
  const std::vector<int64_t> ids = {3, -1, 0, 99, -1, -1, 4, -5, 1, -1, -1, 0};
  Matrix logits(rows, DType::kFloat32, T, E);
  for (const Scoring scoring : kScorings) {
    const Choice got = score(scoring, logits, ids, K, 1);
    // Ids that are present have the scores of a choice without the others.
    Matrix first({1, 2, 3, 4}, DType::kFloat32, 1, E);
    const Choice alone = score(scoring, first, {3, 0}, 2, 1);
    EXPECT_EQ(got.scores[0], alone.scores[0]);
    EXPECT_EQ(got.scores[2], alone.scores[1]);
    for (const int pair : {1, 3, 4, 5, 6, 7, 9, 10}) EXPECT_EQ(got.scores[size_t(pair)], 0.f);
    EXPECT_TRUE(std::isnan(got.scores[8]) && std::isnan(got.scores[11]));
    EXPECT_EQ(got.counts, (std::vector<int32_t>{2, 1, 0, 1}));
  }
}

TEST(GivenIds, CountEachTimeTheyAreRepeated) {
  Matrix logits({1, 2, 3}, DType::kFloat32, 1, 3);
  for (const Scoring scoring : {Scoring::kSoftmaxOverChosen, Scoring::kSigmoidRenormalized}) {
    const Choice got = score(scoring, logits, {1, 1}, 2, 1);
    EXPECT_EQ(got.scores, (std::vector<float>{0.5f, 0.5f}));
    EXPECT_EQ(got.counts, (std::vector<int32_t>{0, 2, 0}));
  }
}

TEST(GivenIds, HaveEqualScoresIfAllWeightsAreZero) {
  Matrix logits({-kInfinity, -kInfinity, 3}, DType::kFloat32, 1, 3);
  const Choice got = score(Scoring::kSigmoidRenormalized, logits, {0, -1, 1}, 3, 4);
  EXPECT_EQ(got.scores, (std::vector<float>{2, 0, 2}));
}

}  // namespace
}  // namespace tilemoe::routing_test
