// Routing from chosen ids, from triples and from counts, against a stable sort of all pairs.
#include <gtest/gtest.h>

#include "routing_support.h"
#include "verify/registry.h"

namespace tilemoe::routing_test {
namespace {

// Pairs as the caller gives them.
struct Pairs {
  std::vector<int64_t> tokens, experts;
  std::vector<float> scores;
};

Pairs random_top_k(int64_t T, int64_t E, int64_t K, uint32_t seed) {
  std::mt19937 random(seed);
  Pairs pairs;
  for (int64_t t = 0; t < T; ++t)
    for (int64_t k = 0; k < K; ++k) {
      const int64_t bad[] = {-1, E, INT32_MAX, INT32_MIN};
      pairs.tokens.push_back(t);
      pairs.experts.push_back(random() % 9 == 0 ? bad[random() % 4]
                                                : random() % static_cast<uint32_t>(E));
      pairs.scores.push_back(random() % 11 == 0 ? kNaN : static_cast<float>(random() % 1000));
    }
  return pairs;
}

// About `each` pairs a token in order, among them tokens out of range and out of order.
Pairs random_triples(int64_t T, int64_t E, int64_t count, uint32_t seed) {
  std::mt19937 random(seed);
  Pairs pairs;
  for (int64_t i = 0; i < count; ++i) {
    int64_t token = i * T / std::max<int64_t>(1, count);
    if (random() % 7 == 0) token = static_cast<int64_t>(random() % 40) - 20 + token;
    if (random() % 50 == 0) token = random() % 2 == 0 ? -5 : T + 3;
    pairs.tokens.push_back(token);
    pairs.experts.push_back(static_cast<int64_t>(random() % static_cast<uint32_t>(E + 1)) - 1);
    pairs.scores.push_back(random() % 13 == 0 ? kNaN : static_cast<float>(random() % 1000));
  }
  return pairs;
}

// The routing by definition: walk the pairs, hand out an expert's rows in their order.
struct Reference {
  std::vector<int32_t> offsets, row_token, pair_row, token_offsets;
  std::vector<float> row_score;
  int32_t over_capacity = 0, bad_ids = 0, nan_tokens = 0;
};

Reference route(const Pairs& pairs, int64_t T, int64_t E, int64_t capacity) {
  Reference want;
  const size_t count = pairs.tokens.size();
  std::vector<bool> kept(count);
  std::vector<int64_t> reached(count);  // largest token in range up to a pair
  std::vector<bool> nan(static_cast<size_t>(T));
  int64_t largest = -1;
  for (size_t i = 0; i < count; ++i) {
    const int64_t token = pairs.tokens[i], e = pairs.experts[i];
    const bool in_order = token >= 0 && token < T && token >= largest;
    if (in_order) largest = token;
    reached[i] = largest;
    kept[i] = in_order && e >= 0 && e < E;
    want.bad_ids += kept[i] ? 0 : 1;
    if (kept[i] && std::isnan(pairs.scores[i])) nan[static_cast<size_t>(token)] = true;
  }
  want.nan_tokens = static_cast<int32_t>(std::count(nan.begin(), nan.end(), true));
  want.pair_row.assign(count, -1);
  want.offsets.push_back(0);
  for (int64_t e = 0; e < E; ++e) {
    for (size_t i = 0; i < count; ++i) {
      if (!kept[i] || pairs.experts[i] != e) continue;
      if (static_cast<int64_t>(want.row_token.size()) == capacity) {
        ++want.over_capacity;
        continue;
      }
      want.pair_row[i] = static_cast<int32_t>(want.row_token.size());
      want.row_token.push_back(static_cast<int32_t>(pairs.tokens[i]));
      want.row_score.push_back(pairs.scores[i]);
    }
    want.offsets.push_back(static_cast<int32_t>(want.row_token.size()));
  }
  for (int64_t t = 0; t <= T; ++t)
    want.token_offsets.push_back(static_cast<int32_t>(
        std::count_if(reached.begin(), reached.end(), [&](int64_t each) { return each < t; })));
  return want;
}

void expect_routing(const Reference& want, const Routed& got) {
  EXPECT_EQ(got.offsets(), want.offsets);
  EXPECT_EQ(got.row_tokens(), want.row_token);
  EXPECT_EQ(bits_of(got.row_scores()), bits_of(want.row_score));
  EXPECT_EQ(got.pair_rows(), want.pair_row);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_OVER_CAPACITY), want.over_capacity);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_BAD_IDS), want.bad_ids);
  EXPECT_EQ(got.counter(TILEMOE_COUNT_NAN_TOKENS), want.nan_tokens);
  EXPECT_EQ(got.counter(3), 0);
}

std::vector<int32_t> narrow(const std::vector<int64_t>& ids) {
  return {ids.begin(), ids.end()};
}

struct TopKShape {
  int64_t T, E, K;
};
const TopKShape kTopKShapes[] = {{0, 3, 2},    {1, 1, 1},      {1, 9, 9},     {33, 7, 3},
                                 {257, 64, 8}, {700, 4096, 9}, {20000, 5, 2}, {3001, 1, 1}};

TEST(RouteTopK, EqualsAStableSort) {
  for (const auto& [T, E, K] : kTopKShapes) {
    if (verify::reduced_run() && T * E > 20'000) continue;
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", K " << K);
    Pairs pairs = random_top_k(T, E, K, 7);
    Routed routed(RoutingSpec::top_k(Device::kCpu, T, E, K));
    const std::vector<int32_t> ids = narrow(pairs.experts);
    routed.route_top_k({ids.data(), DType::kInt32, {T, K}},
                       {pairs.scores.data(), DType::kFloat32, {T, K}});
    expect_routing(route(pairs, T, E, T * K), routed);
  }
}

TEST(RouteTopK, SkipsLongIdsThatOnlyTheirLowHalfWouldSave) {
  const std::vector<int64_t> ids = {(int64_t{1} << 32) + 1, 1, int64_t{1} << 40, -1, INT64_MIN, 2};
  const std::vector<float> scores = {1, 2, 3, 4, 5, 6};
  Routed routed(RoutingSpec::top_k(Device::kCpu, 3, 4, 2));
  routed.route_top_k({ids.data(), DType::kInt64, {3, 2}}, {scores.data(), DType::kFloat32, {3, 2}});
  EXPECT_EQ(routed.pair_rows(), (std::vector<int32_t>{-1, 0, -1, -1, -1, 1}));
  EXPECT_EQ(routed.row_tokens(), (std::vector<int32_t>{0, 2}));
  EXPECT_EQ(routed.counter(TILEMOE_COUNT_BAD_IDS), 4);
}

TEST(RouteTopK, ReadsScoresOfEveryType) {
  const int64_t T = 40, E = 6, K = 3;
  Pairs pairs = random_top_k(T, E, K, 3);
  for (DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16}) {
    Matrix scores(pairs.scores, dtype, T, K);
    pairs.scores = scores.values();
    Routed routed(RoutingSpec::top_k(Device::kCpu, T, E, K));
    routed.route_top_k({pairs.experts.data(), DType::kInt64, {T, K}}, scores.tensor());
    const Reference want = route(pairs, T, E, T * K);
    EXPECT_EQ(routed.pair_rows(), want.pair_row);
    for (size_t row = 0; row < want.row_score.size(); ++row)
      EXPECT_EQ(order::key(routed.row_scores()[row]), order::key(want.row_score[row]));
  }
}

// The pairs that do not fit belong to the highest expert, and to its highest tokens.
TEST(RouteTopK, DropsTheHighestPastCapacity) {
  const int64_t T = 30, E = 5, K = 2;
  const Pairs pairs = random_top_k(T, E, K, 11);
  for (int64_t capacity = 1; capacity <= T * K; ++capacity) {
    SCOPED_TRACE(testing::Message() << "capacity " << capacity);
    RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, T, E, K);
    spec.capacity = capacity;
    Routed routed(spec);
    routed.route_top_k({pairs.experts.data(), DType::kInt64, {T, K}},
                       {pairs.scores.data(), DType::kFloat32, {T, K}});
    expect_routing(route(pairs, T, E, capacity), routed);
  }
}

TEST(RouteGeneral, EqualsAStableSort) {
  struct Shape {
    int64_t T, E, pairs;
  };
  for (const auto& [T, E, count] : {Shape{0, 3, 0},
                                    {0, 3, 9},
                                    {5, 3, 0},
                                    {1, 1, 1},
                                    {1, 4, 300},
                                    {40, 7, 130},
                                    {1000, 5, 12},
                                    {700, 16, 9000},
                                    {90, 2, 30000}}) {
    SCOPED_TRACE(testing::Message() << "T " << T << ", E " << E << ", pairs " << count);
    const Pairs pairs = random_triples(T, E, count, 5);
    for (int64_t capacity : {count, count / 2}) {
      if (capacity == 0 && count > 0) continue;  // 0 stands for the bound
      RoutingSpec spec = RoutingSpec::general(Device::kCpu, T, E, count);
      spec.capacity = capacity;
      const Reference want = route(pairs, T, E, capacity);
      const std::vector<int32_t> tokens = narrow(pairs.tokens), experts = narrow(pairs.experts);
      Routed wide(spec), short_ids(spec);
      wide.route_triples(vector_of(pairs.tokens), vector_of(pairs.experts),
                         vector_of(pairs.scores));
      short_ids.route_triples(vector_of(tokens), vector_of(experts), vector_of(pairs.scores));
      for (const Routed* got : {&wide, &short_ids}) {
        expect_routing(want, *got);
        EXPECT_EQ(got->token_offsets(), want.token_offsets);
      }
    }
  }
}

TEST(RouteGeneral, KeepsRepeatedPairs) {
  const std::vector<int32_t> tokens = {0, 0, 0, 2, 2}, experts = {1, 1, 0, 1, 1};
  const std::vector<float> scores = {1, 2, 3, 4, 5};
  Routed routed(RoutingSpec::general(Device::kCpu, 3, 2, 5));
  routed.route_triples(vector_of(tokens), vector_of(experts), vector_of(scores));
  EXPECT_EQ(routed.pair_rows(), (std::vector<int32_t>{1, 2, 0, 3, 4}));
  EXPECT_EQ(routed.row_tokens(), (std::vector<int32_t>{0, 0, 0, 2, 2}));
  EXPECT_EQ(routed.token_offsets(), (std::vector<int32_t>{0, 3, 3, 5}));
  EXPECT_EQ(routed.counter(TILEMOE_COUNT_BAD_IDS), 0);
}

// A token far out of range must not make those after it look out of order.
TEST(RouteGeneral, SkipsTokensOutOfRangeAlone) {
  const std::vector<int64_t> tokens = {0, int64_t{1} << 33, 1, -1, 2, 1, 2}, experts(7, 0);
  const std::vector<float> scores(7, 1.f);
  Routed routed(RoutingSpec::general(Device::kCpu, 3, 1, 7));
  routed.route_triples(vector_of(tokens), vector_of(experts), vector_of(scores));
  EXPECT_EQ(routed.pair_rows(), (std::vector<int32_t>{0, -1, 1, -1, 2, -1, 3}));
  EXPECT_EQ(routed.token_offsets(), (std::vector<int32_t>{0, 2, 4, 7}));
  EXPECT_EQ(routed.counter(TILEMOE_COUNT_BAD_IDS), 3);
}

// Many blocks of pairs: the middle ones have no token in range, and those after them a smaller
// token than the first ones.
TEST(RouteGeneral, SkipsTokensThatAreOutOfOrderFarBehind) {
  const size_t part = 20000;
  std::vector<int32_t> tokens(3 * part, 2), experts(tokens.size(), 0);
  std::fill(tokens.begin() + part, tokens.begin() + 2 * part, -1);
  std::fill(tokens.begin() + 2 * part, tokens.end(), 1);
  const std::vector<float> scores(tokens.size(), 1.f);
  Routed routed(RoutingSpec::general(Device::kCpu, 3, 1, static_cast<int64_t>(tokens.size())));
  routed.route_triples(vector_of(tokens), vector_of(experts), vector_of(scores));
  EXPECT_EQ(routed.counter(TILEMOE_COUNT_BAD_IDS), 2 * part);
  EXPECT_EQ(routed.token_offsets(), (std::vector<int32_t>{0, 0, 0, 3 * part}));
}

// A token with NaN scores on both sides of a border between blocks of pairs counts once.
TEST(RouteGeneral, CountsATokenWithNaNOnce) {
  const int64_t count = 20000, T = 3;
  std::vector<int32_t> tokens(static_cast<size_t>(count), 1), experts(tokens.size(), 0);
  tokens[0] = 0, tokens.back() = 2;
  std::vector<float> scores(tokens.size(), kNaN);
  scores[0] = 1.f;
  Routed routed(RoutingSpec::general(Device::kCpu, T, 1, count));
  routed.route_triples(vector_of(tokens), vector_of(experts), vector_of(scores));
  EXPECT_EQ(routed.counter(TILEMOE_COUNT_NAN_TOKENS), 2);
}

TEST(RouteGrouped, AddsCountsUpToItsRows) {
  struct Case {
    std::vector<int64_t> counts;
    std::vector<int32_t> offsets;
    int32_t over;
  };
  const int64_t rows = 10;
  for (const Case& each : {Case{{3, 0, 4}, {0, 3, 3, 7}, 0},
                           {{10, 0, 0}, {0, 10, 10, 10}, 0},
                           {{0, 0, 0}, {0, 0, 0, 0}, 0},
                           {{4, -7, 6}, {0, 4, 4, 10}, 0},
                           {{6, 7, 5}, {0, 6, 10, 10}, 8},
                           {{11, 1, 1}, {0, 10, 10, 10}, 3},
                           {{INT64_MAX, INT64_MAX, 1}, {0, 10, 10, 10}, INT32_MAX}}) {
    Routed routed(RoutingSpec::grouped(Device::kCpu, rows, 3));
    std::vector<float> scores(static_cast<size_t>(rows));
    for (size_t i = 0; i < scores.size(); ++i) scores[i] = 0.5f + static_cast<float>(i);
    routed.routing().from_counts(vector_of(each.counts), vector_of(scores));
    EXPECT_EQ(routed.offsets(), each.offsets);
    EXPECT_EQ(routed.counter(TILEMOE_COUNT_OVER_CAPACITY), each.over);
    EXPECT_EQ(routed.counter(TILEMOE_COUNT_BAD_IDS), 0);
    scores.resize(static_cast<size_t>(routed.rows()));
    EXPECT_EQ(routed.row_scores(), scores);
    EXPECT_EQ(routed.get().row_token, nullptr);
    EXPECT_EQ(routed.get().pair_row, nullptr);

    const std::vector<int32_t> narrow_counts = {3, 1, 4};
    routed.routing().from_counts(vector_of(narrow_counts));
    EXPECT_EQ(routed.offsets(), (std::vector<int32_t>{0, 3, 4, 8}));
    EXPECT_EQ(routed.row_scores(), std::vector<float>(8, 1.f));
    EXPECT_EQ(routed.counter(TILEMOE_COUNT_OVER_CAPACITY), 0);
  }
}

TEST(RouteGrouped, TakesNoRowsAtAll) {
  Routed routed(RoutingSpec::grouped(Device::kCpu, 0, 2));
  const std::vector<int32_t> counts = {0, 5};
  routed.routing().from_counts(vector_of(counts));
  EXPECT_EQ(routed.offsets(), (std::vector<int32_t>{0, 0, 0}));
  EXPECT_EQ(routed.counter(TILEMOE_COUNT_OVER_CAPACITY), 5);
}

}  // namespace
}  // namespace tilemoe::routing_test
