// Token rounding against a full sort of tokens x experts.
#include <gtest/gtest.h>

#include <array>
#include <map>
#include <numeric>
#include <set>

#include "routing/rounding.h"
#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

const Rounding kRules[] = {Rounding::kNearest, Rounding::kUp, Rounding::kDown,
                           Rounding::kStochastic, Rounding::kBalanced};

struct Shape {
  int64_t T, E, K, m;
};

// f' by the definition in the documentation.
std::vector<int64_t> targets(Rounding rule, const std::vector<int32_t>& f, const Shape& shape,
                             int64_t seed, int64_t step) {
  const int64_t m = shape.m;
  const size_t E = f.size();
  std::vector<int64_t> target(E);
  if (shape.T < m) return {f.begin(), f.end()};
  std::vector<float> remainders(E);
  int64_t floors = 0;
  for (size_t e = 0; e < E; ++e) {
    target[e] = f[e] / m * m;
    remainders[e] = static_cast<float>(f[e] % m);
    floors += target[e];
  }
  for (size_t e = 0; e < E; ++e) {
    const int64_t remainder = f[e] % m;
    bool up = false;
    if (rule == Rounding::kNearest) up = remainder != 0 && remainder >= m - remainder;
    if (rule == Rounding::kUp) up = remainder != 0;
    if (rule == Rounding::kStochastic)
      up = rounding_bits(seed, step, static_cast<int64_t>(e)) * 0x1p-32 <
           static_cast<double>(remainder) / static_cast<double>(m);
    if (up) target[e] += m;
  }
  if (rule == Rounding::kBalanced) {
    const auto ups = static_cast<size_t>(
        std::floor(static_cast<double>(shape.T * shape.K - floors) / static_cast<double>(m) + 0.5));
    const std::vector<int32_t> order = sorted_descending(remainders);
    for (size_t i = 0; i < ups; ++i) target[static_cast<size_t>(order[i])] += m;
  }
  for (int64_t& each : target) each = std::min(each, shape.T / m * m);
  return target;
}

struct Row {
  int32_t token, expert;
  float score;
  bool added;
};

struct Reference {
  std::vector<int32_t> counts;    // f
  std::vector<int64_t> targets;   // f'
  std::vector<Row> rows;          // by expert, then token
  std::vector<int32_t> pair_row;  // by token: its K in order, then added by expert
  std::vector<int32_t> token_offsets{0};
  std::vector<std::vector<int32_t>> chosen;  // (T) of K
  int32_t over_capacity = 0, nan_tokens = 0, dropped = 0;
};

Reference round(Rounding rule, const std::vector<float>& logits, const Shape& shape,
                int64_t capacity, int64_t seed, int64_t step) {
  const auto& [T, E, K, m] = shape;
  Reference want;
  want.counts.assign(static_cast<size_t>(E), 0);
  std::vector<std::vector<float>> p, s(static_cast<size_t>(T));
  for (int64_t t = 0; t < T; ++t) {
    const std::vector<float> row = row_of_logits(logits, t, E);
    p.push_back(softmax_in_lanes(row));
    std::vector<int32_t> chosen = sorted_descending(row);
    chosen.resize(static_cast<size_t>(K));
    std::vector<float> chosen_logits;
    for (int32_t e : chosen) {
      ++want.counts[static_cast<size_t>(e)];
      chosen_logits.push_back(row[static_cast<size_t>(e)]);
    }
    s[static_cast<size_t>(t)] = has_nan(row) ? std::vector<float>(static_cast<size_t>(K), kNaN)
                                             : softmax_in_lanes(chosen_logits);
    want.nan_tokens += has_nan(row) ? 1 : 0;
    want.chosen.push_back(chosen);
  }
  want.targets = targets(rule, want.counts, shape, seed, step);
  for (size_t e = 0; e < want.counts.size(); ++e)
    want.dropped += std::max(0, want.counts[e] - static_cast<int32_t>(want.targets[e]));
  for (int64_t e = 0; e < E; ++e) {
    std::vector<Row> all;
    for (int64_t t = 0; t < T; ++t) {
      const auto& chosen = want.chosen[static_cast<size_t>(t)];
      const auto at = std::find(chosen.begin(), chosen.end(), e) - chosen.begin();
      const bool added = at == K;
      all.push_back({static_cast<int32_t>(t), static_cast<int32_t>(e),
                     added ? p[static_cast<size_t>(t)][static_cast<size_t>(e)]
                           : s[static_cast<size_t>(t)][static_cast<size_t>(at)],
                     added});
    }
    std::stable_sort(all.begin(), all.end(), [](const Row& a, const Row& b) {
      if (a.added != b.added) return b.added;
      return std::isnan(b.score) ? !std::isnan(a.score) : a.score > b.score;
    });
    all.resize(static_cast<size_t>(want.targets[static_cast<size_t>(e)]));
    std::sort(all.begin(), all.end(), [](const Row& a, const Row& b) { return a.token < b.token; });
    for (const Row& row : all) {
      if (static_cast<int64_t>(want.rows.size()) < capacity)
        want.rows.push_back(row);
      else
        ++want.over_capacity;
    }
  }
  for (int64_t t = 0; t < T; ++t) {
    for (int32_t e : want.chosen[static_cast<size_t>(t)])
      for (size_t r = 0; r < want.rows.size(); ++r)
        if (want.rows[r].token == t && want.rows[r].expert == e && !want.rows[r].added)
          want.pair_row.push_back(static_cast<int32_t>(r));
    for (size_t r = 0; r < want.rows.size(); ++r)
      if (want.rows[r].token == t && want.rows[r].added)
        want.pair_row.push_back(static_cast<int32_t>(r));
    want.token_offsets.push_back(static_cast<int32_t>(want.pair_row.size()));
  }
  want.pair_row.resize(static_cast<size_t>(capacity), -1);
  return want;
}

RoutingSpec spec_of(Rounding rule, const Shape& shape) {
  return RoutingSpec::rounded(Device::kCpu, shape.T, shape.E, shape.K, rule, shape.m);
}

// Routes, and returns f.
std::vector<int32_t> route(Routed& routed, Matrix& logits, int64_t seed, int64_t step) {
  const tilemoe_routing_spec& spec = routed.get().spec;
  std::vector<int32_t> counts(static_cast<size_t>(spec.E), -7);
  routed.round(logits.tensor(), seed, step, vector_of(counts));
  return counts;
}

void expect_equal(const Reference& want, const Routed& got) {
  const tilemoe_routing& routing = got.get();
  const auto M = static_cast<int32_t>(want.rows.size());
  ASSERT_EQ(got.rows(), M);
  for (int32_t r = 0; r < M; ++r) {
    const Row& row = want.rows[static_cast<size_t>(r)];
    ASSERT_EQ(routing.row_token[r], row.token) << "row " << r;
    ASSERT_EQ(got.expert_of(r), row.expert) << "row " << r;
    ASSERT_EQ(order::key(routing.row_score[r]), order::key(row.score)) << "row " << r;
  }
  EXPECT_EQ(got.token_offsets(), want.token_offsets);
  EXPECT_EQ(got.pair_rows(), want.pair_row);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_OVER_CAPACITY), want.over_capacity);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_NAN_TOKENS), want.nan_tokens);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_BAD_IDS), 0);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_DROPPED), want.dropped);
}

using Parameter = std::tuple<Rounding, Logits>;
class TokenRounding : public testing::TestWithParam<Parameter> {
 protected:
  Rounding rule() const { return std::get<0>(GetParam()); }
  Logits kind() const { return std::get<1>(GetParam()); }
};

TEST_P(TokenRounding, EqualsAFullSort) {
  const Shape shapes[] = {{0, 3, 2, 4},     {1, 4, 2, 1},   {1, 4, 2, 4},    {3, 5, 5, 4},
                          {4, 5, 2, 4},     {60, 7, 2, 8},  {100, 1, 1, 16}, {130, 9, 9, 16},
                          {257, 12, 3, 32}, {90, 33, 4, 5}, {64, 40, 1, 3},  {300, 8, 2, 128},
                          {200, 6, 3, 200}, {50, 64, 2, 1}, {40, 700, 3, 2}};
  for (const Shape& shape : shapes) {
    const auto& [T, E, K, m] = shape;
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K << ", m " << m);
    const std::vector<float> values = make_logits(kind(), T, E, 4);
    Matrix logits(values, DType::kFloat32, T, E);
    const RoutingSpec spec = spec_of(rule(), shape);
    Routed routed(spec);
    const std::vector<int32_t> counts = route(routed, logits, 5, 6);
    const Reference want = round(rule(), values, shape, spec.bound(), 5, 6);
    EXPECT_EQ(counts, want.counts);
    EXPECT_EQ(want.over_capacity, 0) << "the documented bound is too small";
    expect_equal(want, routed);
  }
}

TEST_P(TokenRounding, ReadsEveryTypeAndStride) {
  const Shape shape = {150, 21, 3, 8};
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    for (int64_t gap : {0, 5}) {
      Matrix logits(make_logits(kind(), shape.T, shape.E, 8), dtype, shape.T, shape.E, gap);
      const RoutingSpec spec = spec_of(rule(), shape);
      Routed routed(spec);
      route(routed, logits, 1, 2);
      expect_equal(round(rule(), logits.values(), shape, spec.bound(), 1, 2), routed);
    }
}

TEST_P(TokenRounding, DropsTheHighestPastCapacity) {
  const Shape shape = {40, 6, 2, 8};
  const std::vector<float> values = make_logits(kind(), shape.T, shape.E, 2);
  Matrix logits(values, DType::kFloat32, shape.T, shape.E);
  for (int64_t capacity = 1; capacity < 130; capacity += 3) {
    SCOPED_TRACE(testing::Message() << "capacity " << capacity);
    RoutingSpec spec = spec_of(rule(), shape);
    spec.capacity = capacity;
    Routed routed(spec);
    route(routed, logits, 3, 4);
    expect_equal(round(rule(), values, shape, capacity, 3, 4), routed);
  }
}

// Invariants, at sizes that are too large for a full sort.
TEST_P(TokenRounding, KeepsItsPromises) {
  for (const Shape& shape : {Shape{4096, 32, 4, 128}, {1000, 512, 8, 16}, {3000, 5, 2, 999}}) {
    const auto& [T, E, K, m] = shape;
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K << ", m " << m);
    const std::vector<float> values = make_logits(kind(), T, E, 12);
    Matrix logits(values, DType::kFloat32, T, E);
    Routed routed(spec_of(rule(), shape));
    const std::vector<int32_t> f = route(routed, logits, 8, 9);
    const std::vector<int32_t> offsets = routed.offsets();
    EXPECT_EQ(std::accumulate(f.begin(), f.end(), int64_t{0}), T * K);
    EXPECT_EQ(routed.counter(TILEMOE_COUNT_OVER_CAPACITY), 0);
    std::vector<std::set<int32_t>> chosen(static_cast<size_t>(E));
    for (int64_t t = 0; t < T; ++t) {
      const std::vector<float> row = row_of_logits(values, t, E);
      const std::vector<int32_t> order = sorted_descending(row);
      for (int64_t k = 0; k < K; ++k)
        chosen[static_cast<size_t>(order[static_cast<size_t>(k)])].insert(static_cast<int32_t>(t));
    }
    for (size_t e = 0; e < f.size(); ++e) {
      const int32_t rows = offsets[e + 1] - offsets[e];
      ASSERT_EQ(rows % m, 0) << "expert " << e;
      ASSERT_LT(std::abs(rows - f[e]), m) << "expert " << e;
      int32_t kept = 0;
      for (int32_t r = offsets[e]; r < offsets[e + 1]; ++r) {
        ASSERT_TRUE(r == offsets[e] || routed.get().row_token[r - 1] < routed.get().row_token[r]);
        kept += chosen[e].count(routed.get().row_token[r]) > 0 ? 1 : 0;
      }
      // No chosen pair is dropped while an added one is kept.
      ASSERT_EQ(kept, std::min(rows, f[e])) << "expert " << e;
    }
  }
}

// ------------------------------------------------------------------ groups

// Routings of groups of S tokens, one after the other, as one of all their tokens.
class Concatenation {
 public:
  Concatenation(int64_t S, int64_t E, int64_t capacity)
      : S_(S), E_(E), capacity_(capacity), rows_(static_cast<size_t>(E)), counts(rows_.size(), 0) {}

  void append(const Routed& group, const std::vector<int32_t>& f) {
    const tilemoe_routing& routing = group.get();
    const auto first_token = static_cast<int32_t>(S_ * groups_);
    for (size_t e = 0; e < rows_.size(); ++e) {
      counts[e] += f[e];
      for (int32_t r = routing.offsets[e]; r < routing.offsets[e + 1]; ++r)
        rows_[e].push_back({groups_, r, first_token + routing.row_token[r], routing.row_score[r]});
    }
    for (int64_t t = 0; t < S_; ++t) {
      const auto* const pairs = routing.pair_row;
      pairs_.emplace_back();
      for (int32_t p = routing.token_offsets[t]; p < routing.token_offsets[t + 1]; ++p)
        pairs_.back().push_back({groups_, pairs[p]});
    }
    for (size_t i = 0; i < counters.size(); ++i) counters[i] += group.counter(static_cast<int>(i));
    ++groups_;
  }

  void finish() {
    std::map<std::pair<int64_t, int32_t>, int32_t> row_of;  // by group and its row
    for (const auto& of_expert : rows_) {
      for (const GroupRow& row : of_expert) {
        if (static_cast<int64_t>(row_token.size()) == capacity_) {
          ++counters[TILEMOE_COUNT_OVER_CAPACITY];
          continue;
        }
        row_of[{row.group, row.row}] = static_cast<int32_t>(row_token.size());
        row_token.push_back(row.token), row_score.push_back(row.score);
      }
      offsets.push_back(static_cast<int32_t>(row_token.size()));
    }
    for (const auto& of_token : pairs_) {
      for (const auto& pair : of_token)
        if (const auto found = row_of.find(pair); found != row_of.end())
          pair_row.push_back(found->second);
      token_offsets.push_back(static_cast<int32_t>(pair_row.size()));
    }
    pair_row.resize(static_cast<size_t>(capacity_), -1);
  }

 private:
  struct GroupRow {
    int64_t group;
    int32_t row, token;
    float score;
  };
  int64_t S_, E_, capacity_, groups_ = 0;
  std::vector<std::vector<GroupRow>> rows_;                      // by expert
  std::vector<std::vector<std::pair<int64_t, int32_t>>> pairs_;  // by token

 public:
  std::vector<int32_t> counts, offsets{0}, row_token, pair_row, token_offsets{0};
  std::vector<float> row_score;
  std::array<int32_t, TILEMOE_COUNTERS> counters{};
};

// Each group of S tokens routed alone, as a separate batch.
Concatenation route_apart(Rounding rule, const std::vector<float>& values, const Shape& shape,
                          int64_t S, int64_t capacity, int64_t seed, int64_t step) {
  Concatenation all(S, shape.E, capacity);
  const int64_t groups = S > 0 ? shape.T / S : 0;
  for (int64_t g = 0; g < groups; ++g) {
    const auto begin = values.begin() + g * S * shape.E;
    Matrix logits({begin, begin + S * shape.E}, DType::kFloat32, S, shape.E);
    Routed alone(spec_of(rule, {S, shape.E, shape.K, shape.m}));
    const auto drawn = static_cast<uint64_t>(step) * static_cast<uint64_t>(groups) +
                       static_cast<uint64_t>(g);  // modulo 2^64
    all.append(alone, route(alone, logits, seed, static_cast<int64_t>(drawn)));
  }
  all.finish();
  return all;
}

struct Grouped {
  Shape shape;
  int64_t round_tokens;
  int64_t capacity = 0;
};

void expect_groups_apart(Rounding rule, Logits kind, const Grouped& c, int64_t step = 6) {
  const auto& [T, E, K, m] = c.shape;
  SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K << ", m " << m
                                  << ", round_tokens " << c.round_tokens << ", capacity "
                                  << c.capacity << ", step " << step);
  const std::vector<float> values = make_logits(kind, T, E, 14);
  Matrix logits(values, DType::kFloat32, T, E);
  RoutingSpec spec = RoutingSpec::rounded(Device::kCpu, T, E, K, rule, m, c.round_tokens);
  spec.capacity = c.capacity;
  Routed together(spec);
  const std::vector<int32_t> counts = route(together, logits, 5, step);
  const Concatenation want =
      route_apart(rule, values, c.shape, c.round_tokens, spec.bound(), 5, step);
  if (c.capacity == 0) {
    EXPECT_EQ(want.counters[TILEMOE_COUNT_OVER_CAPACITY], 0) << "the bound is too small";
  }
  EXPECT_EQ(counts, want.counts);
  EXPECT_EQ(together.offsets(), want.offsets);
  EXPECT_EQ(together.row_tokens(), want.row_token);
  EXPECT_EQ(bits_of(together.row_scores()), bits_of(want.row_score));
  EXPECT_EQ(together.pair_rows(), want.pair_row);
  EXPECT_EQ(together.token_offsets(), want.token_offsets);
  for (size_t i = 0; i < want.counters.size(); ++i)
    EXPECT_EQ(together.counter(static_cast<int>(i)), want.counters[i]) << "counter " << i;
}

TEST_P(TokenRounding, OfGroupsEqualsEachAlone) {
  const Grouped cases[] = {
      {{0, 3, 2, 4}, 5},           {{1, 4, 2, 1}, 1},      {{60, 7, 2, 8}, 20},
      {{60, 7, 2, 8}, 60},         {{60, 7, 2, 8}, 4},     {{96, 12, 3, 8}, 8},
      {{90, 33, 4, 5}, 9},         {{90, 33, 4, 5}, 45},   {{37, 5, 2, 1}, 1},
      {{300, 8, 2, 128}, 100},     {{520, 9, 9, 16}, 130}, {{64, 40, 1, 3}, 4},
      {{40, 700, 3, 2}, 10},       {{100, 1, 1, 16}, 50},  {{1024, 70, 6, 16}, 64},
      {{1050, 6, 2, 99}, 350},     {{2048, 20, 3, 2}, 2},  {{4096, 32, 4, 128}, 512},
      {{60, 7, 2, 8}, 20, 70},     {{60, 7, 2, 8}, 20, 1}, {{1024, 70, 6, 16}, 64, 3001},
      {{300, 8, 2, 128}, 100, 250}};
  for (const Grouped& each : cases) expect_groups_apart(rule(), kind(), each);
}

TEST(RoundingGroups, DrawAtEveryStep) {
  for (int64_t step : {int64_t{0}, int64_t{-1}, INT64_MAX, INT64_MIN, int64_t{1} << 61})
    expect_groups_apart(Rounding::kStochastic, Logits::kNormal, {{480, 9, 2, 32}, 60}, step);
}

// Every rule rounds other counts than without groups, and no two groups draw the same bits.
TEST(RoundingGroups, DifferFromAllTogether) {
  const Shape shape = {600, 10, 3, 32};
  const std::vector<float> once = make_logits(Logits::kSkewed, 100, shape.E);
  std::vector<float> values;
  for (int i = 0; i < 6; ++i) values.insert(values.end(), once.begin(), once.end());
  Matrix logits(values, DType::kFloat32, shape.T, shape.E);
  for (Rounding rule : kRules) {
    const auto rows = [&](int64_t round_tokens) {
      Routed routed(RoutingSpec::rounded(Device::kCpu, shape.T, shape.E, shape.K, rule, shape.m,
                                         round_tokens));
      route(routed, logits, 1, 2);
      return routed.row_tokens();
    };
    const std::vector<int32_t> grouped = rows(100);
    EXPECT_NE(grouped, rows(0)) << static_cast<int>(rule);
    EXPECT_EQ(rows(600), rows(0)) << static_cast<int>(rule);
    // The groups are the same tokens.
    std::vector<int64_t> of_group(6, 0);
    for (int32_t token : grouped) ++of_group[static_cast<size_t>(token / 100)];
    const bool all_equal = std::count(of_group.begin(), of_group.end(), of_group[0]) == 6;
    EXPECT_EQ(all_equal, rule != Rounding::kStochastic);
  }
}

std::string test_name(const testing::TestParamInfo<Parameter>& info) {
  const char* rules[] = {"Nearest", "Up", "Down", "Stochastic", "Balanced"};
  return std::string(rules[static_cast<size_t>(std::get<0>(info.param))]) +
         name(std::get<1>(info.param));
}
INSTANTIATE_TEST_SUITE_P(, TokenRounding,
                         testing::Combine(testing::ValuesIn(kRules),
                                          testing::Values(Logits::kNormal, Logits::kTies,
                                                          Logits::kSpecial, Logits::kSkewed)),
                         test_name);

TEST(BalancedRounding, KeepsTheSumToHalfATile) {
  for (uint32_t seed = 0; seed < 50; ++seed) {
    const Shape shape = {700, 24, 3, 16};  // no expert is so full that it cannot go up
    Matrix logits(make_logits(Logits::kNormal, shape.T, shape.E, seed), DType::kFloat32, shape.T,
                  shape.E);
    Routed routed(spec_of(Rounding::kBalanced, shape));
    route(routed, logits, 0, 0);
    EXPECT_LE(std::abs(routed.rows() - shape.T * shape.K), shape.m / 2);
  }
}

TEST(BalancedRounding, SendsTheLargestRemaindersUpTiesToTheLowerId) {
  RoutingSpec spec = RoutingSpec::rounded(Device::kCpu, 1000, 6, 1, Rounding::kBalanced, 10);
  std::vector<uint64_t> ranks(6);
  const auto round = [&](std::vector<int32_t> f) {
    std::vector<int32_t> target(f.size());
    rounding_targets(spec, f.data(), 0, 0, ranks.data(), target.data());
    return target;
  };
  using Counts = std::vector<int32_t>;
  EXPECT_EQ(round({15, 25, 35, 45, 5, 5}), (Counts{20, 30, 40, 40, 0, 0}));
  EXPECT_EQ(round({11, 22, 33, 44, 50, 60}), (Counts{10, 20, 30, 50, 50, 60}));
  EXPECT_EQ(round({5, 0, 0, 0, 0, 0}), (Counts{10, 0, 0, 0, 0, 0}));  // a half goes up
  EXPECT_EQ(round({4, 0, 0, 0, 0, 0}), (Counts{0, 0, 0, 0, 0, 0}));
  EXPECT_EQ(round({9, 9, 9, 9, 9, 9}), (Counts{10, 10, 10, 10, 10, 0}));
  spec.T = 12;  // room for one tile alone
  EXPECT_EQ(round({12, 12, 12, 12, 0, 0}), (Counts{10, 10, 10, 10, 0, 0}));
  spec.T = 9;  // nothing is rounded
  EXPECT_EQ(round({9, 8, 7, 3, 0, 0}), (Counts{9, 8, 7, 3, 0, 0}));
}

TEST(NearestRounding, SendsHalfATileUp) {
  for (int64_t m : {1, 2, 3, 7, 8, 128})
    for (int64_t f = 0; f <= 3 * m; ++f) {
      const bool up = rounds_up(TILEMOE_ROUND_NEAREST, f % m, m, 0);
      const int64_t target = rounded_count(f, 100 * m, m, up);
      EXPECT_LE(2 * std::abs(target - f), m);
      EXPECT_TRUE(2 * (f % m) != m || target > f);
    }
}

// Up with probability (f mod m) / m, independently for every step: within 5 standard deviations.
TEST(StochasticRounding, HasTheRightFrequencies) {
  const int64_t m = 16, steps = 20000;
  RoutingSpec spec = RoutingSpec::rounded(Device::kCpu, 1 << 20, m, 1, Rounding::kStochastic, m);
  std::vector<int32_t> f(static_cast<size_t>(m)), target(f.size());
  std::vector<int64_t> ups(f.size(), 0);
  std::vector<uint64_t> ranks(f.size());
  for (size_t e = 0; e < f.size(); ++e) f[e] = static_cast<int32_t>(32 + e);
  int64_t both = 0;  // experts 8 and 9 in the same step
  for (int64_t step = 0; step < steps; ++step) {
    rounding_targets(spec, f.data(), 1234, step, ranks.data(), target.data());
    for (size_t e = 0; e < f.size(); ++e) {
      ASSERT_TRUE(target[e] == 32 || target[e] == 48);
      ups[e] += target[e] == 48 ? 1 : 0;
    }
    both += target[8] == 48 && target[9] == 48 ? 1 : 0;
  }
  const auto expect_frequency = [&](int64_t seen, double p) {
    const auto n = static_cast<double>(steps);
    EXPECT_LE(std::fabs(static_cast<double>(seen) - n * p), 5 * std::sqrt(n * p * (1 - p)));
  };
  EXPECT_EQ(ups[0], 0);
  for (size_t e = 0; e < f.size(); ++e)
    expect_frequency(ups[e], static_cast<double>(e) / static_cast<double>(m));
  expect_frequency(both, 8.0 / 16 * 9 / 16);
}

TEST(StochasticRounding, DependsOnSeedAndStepAlone) {
  const Shape shape = {500, 16, 2, 32};
  Matrix logits(make_logits(Logits::kNormal, shape.T, shape.E), DType::kFloat32, shape.T, shape.E);
  const auto offsets = [&](int64_t seed, int64_t step) {
    Routed routed(spec_of(Rounding::kStochastic, shape));
    route(routed, logits, seed, step);
    return routed.offsets();
  };
  EXPECT_EQ(offsets(1, 1), offsets(1, 1));
  EXPECT_NE(offsets(1, 1), offsets(1, 2));
  EXPECT_NE(offsets(1, 1), offsets(2, 1));
}

// A token with a NaN ranks last: it takes no place from another token of the same kind.
TEST(RoundingWithNaN, NeverPrefersTheTokenWithNaN) {
  const Shape shape = {96, 8, 2, 16};
  for (Rounding rule : {Rounding::kDown, Rounding::kUp}) {
    std::vector<float> values = make_logits(Logits::kNormal, shape.T, shape.E, 21);
    values[5 * 8 + 7] = kNaN;
    Matrix logits(values, DType::kFloat32, shape.T, shape.E);
    Routed routed(spec_of(rule, shape));
    const std::vector<int32_t> f = route(routed, logits, 0, 0);
    EXPECT_EQ(routed.counter(TILEMOE_COUNT_NAN_TOKENS), 1);
    const std::vector<int32_t> order = sorted_descending(row_of_logits(values, 5, shape.E));
    for (int32_t r = 0; r < routed.rows(); ++r) {
      const bool nan = std::isnan(routed.get().row_score[r]);
      ASSERT_EQ(nan, routed.get().row_token[r] == 5);
      if (!nan) continue;
      const int32_t e = routed.expert_of(r);
      const int32_t rows =
          routed.offsets()[static_cast<size_t>(e) + 1] - routed.offsets()[static_cast<size_t>(e)];
      ASSERT_TRUE(e == order[0] || e == order[1]) << "added";
      ASSERT_GE(rows, f[static_cast<size_t>(e)]) << "kept while another was dropped";
    }
  }
}

}  // namespace
}  // namespace tilemoe::routing_test
