// Group-limited choice against a full sort, and the scores of ids that were chosen elsewhere.
#include <gtest/gtest.h>

#include <numeric>

#include "routing/groups.h"
#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

struct Choice {
  std::vector<int32_t> ids;   // (T, K)
  std::vector<float> scores;  // (T, K)
  std::vector<int32_t> counts;
};

struct Case {
  int64_t T, E, K, n_group, topk_group;
  Scoring scoring = Scoring::kSigmoidRenormalized;
  GroupScore group_score = GroupScore::kTop2Sum;
  float factor = 1;
};

bool is_sigmoid(Scoring scoring) {
  return scoring == Scoring::kSigmoid || scoring == Scoring::kSigmoidRenormalized;
}

Choice choose(const Case& c, Matrix& logits, const std::vector<float>& bias) {
  const auto pairs = static_cast<size_t>(c.T * c.K);
  Choice choice{std::vector<int32_t>(pairs), std::vector<float>(pairs),
                std::vector<int32_t>(static_cast<size_t>(c.E))};
  top_k({.device = Device::kCpu,
         .scoring = c.scoring,
         .K = c.K,
         .logits = logits.tensor(),
         .selection_bias = bias.empty() ? ConstTensor() : vector_of(bias),
         .ids = {choice.ids.data(), DType::kInt32, {c.T, c.K}},
         .scores = {choice.scores.data(), DType::kFloat32, {c.T, c.K}},
         .expert_counts = {choice.counts.data(), DType::kInt32, {c.E}},
         .n_group = c.n_group,
         .topk_group = c.topk_group,
         .group_score = c.group_score,
         .routed_scaling_factor = c.factor});
  return choice;
}

// The experts of the best groups, best first, then the others as they come.
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
            const int32_t id = got.ids[static_cast<size_t>(t * c.K + k)];
            ASSERT_EQ(id, want[static_cast<size_t>(k)]) << "token " << t << ", slot " << k;
            ++counts[static_cast<size_t>(id)];
          }
        }
        EXPECT_EQ(got.counts, counts);
      }
}

INSTANTIATE_TEST_SUITE_P(All, GroupLimited,
                         testing::Values(Logits::kNormal, Logits::kTies, Logits::kSpecial,
                                         Logits::kSkewed),
                         [](const auto& each) { return name(each.param); });

TEST(GroupLimitedScores, AreThoseOfTheChosenTimesTheFactor) {
  for (const Scoring scoring :
       {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxOverAll, Scoring::kSoftmaxRenormalized,
        Scoring::kSigmoid, Scoring::kSigmoidRenormalized})
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

// As many groups as there are: the choice and the bits of a choice without groups.
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

Choice score(Scoring scoring, Matrix& logits, const std::vector<int32_t>& ids, int64_t K,
             float factor) {
  const Tensor view = logits.tensor();
  const int64_t T = view.shape[0], E = view.shape[1];
  Choice choice{ids, std::vector<float>(ids.size(), -77.f),
                std::vector<int32_t>(static_cast<size_t>(E))};
  top_k_scores({.device = Device::kCpu,
                .scoring = scoring,
                .routed_scaling_factor = factor,
                .logits = view,
                .ids = {choice.ids.data(), DType::kInt32, {T, K}},
                .scores = {choice.scores.data(), DType::kFloat32, {T, K}},
                .expert_counts = {choice.counts.data(), DType::kInt32, {E}}});
  return choice;
}

const Scoring kScorings[] = {Scoring::kSoftmaxOverChosen, Scoring::kSoftmaxOverAll,
                             Scoring::kSoftmaxRenormalized, Scoring::kSigmoid,
                             Scoring::kSigmoidRenormalized};

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
  const std::vector<int32_t> ids = {3, -1, 0, 99, -1, -1, 4, -5, 1, -1, -1, 0};
  Matrix logits(rows, DType::kFloat32, T, E);
  for (const Scoring scoring : kScorings) {
    const Choice got = score(scoring, logits, ids, K, 1);
    // Those that are there have the scores that they have among themselves.
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

TEST(GivenIds, ShareEquallyWhereAllWeighNothing) {
  Matrix logits({-kInfinity, -kInfinity, 3}, DType::kFloat32, 1, 3);
  const Choice got = score(Scoring::kSigmoidRenormalized, logits, {0, -1, 1}, 3, 4);
  EXPECT_EQ(got.scores, (std::vector<float>{2, 0, 2}));
}

}  // namespace
}  // namespace tilemoe::routing_test
