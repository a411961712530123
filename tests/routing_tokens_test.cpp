// The routing at small T from the tokens themselves: logits against float64 and, bit for bit,
// against the documented order of the sum; everything else against top-K and the routing from those
// logits.
#include <gtest/gtest.h>

#include <numeric>

#include "routing/decode.h"
#include "routing_support.h"

namespace tilemoe::routing_test {
namespace {

struct Size {
  int64_t T, d, E, K;
};

// Values of X and of the router's weight, in the types that a router may have.
struct Types {
  DType X, weight, logits;
};
const Types kTypes[] = {{DType::kFloat32, DType::kFloat32, DType::kFloat32},
                        {DType::kBFloat16, DType::kBFloat16, DType::kBFloat16},
                        {DType::kBFloat16, DType::kBFloat16, DType::kFloat32},
                        {DType::kFloat16, DType::kFloat16, DType::kFloat16},
                        {DType::kBFloat16, DType::kFloat32, DType::kFloat32},
                        {DType::kFloat16, DType::kFloat32, DType::kBFloat16}};

std::vector<float> normal(int64_t count, float scale, uint32_t seed) {
  std::mt19937 random(seed);
  std::normal_distribution<float> distribution(0.f, scale);
  std::vector<float> x(static_cast<size_t>(count));
  for (float& each : x) each = distribution(random);
  return x;
}

// A matrix on 16 bytes, with gaps of `gap` NaN elements between its rows.
class Aligned {
 public:
  Aligned(const std::vector<float>& values, DType dtype, int64_t rows, int64_t columns,
          int64_t gap = 0)
      : matrix_(values, dtype, rows, columns, gap),
        memory_(std::max<size_t>(matrix_.bytes().size(), 1)) {
    std::memcpy(memory_.data(), matrix_.bytes().data(), matrix_.bytes().size());
    view_ = matrix_.tensor();
    view_.data = memory_.data();
  }
  ConstTensor tensor() const { return view_; }
  std::vector<float> values() { return matrix_.values(); }

 private:
  Matrix matrix_;
  Guarded memory_;
  Tensor view_;
};

struct Problem {
  Size size;
  Types types;
  Aligned X, weight;
  std::vector<float> bias, selection_bias;
  TokenRouting given{.logits_dtype = DType::kFloat32, .X = {}, .router_weight = {}};
  int64_t capacity = 0;

  Problem(const Size& its_size, const Types& its_types, const std::vector<float>& x,
          const std::vector<float>& w, int64_t gap = 0)
      : size(its_size),
        types(its_types),
        X(x, types.X, size.T, size.d, gap),
        weight(w, types.weight, size.E, size.d, gap) {
    given.logits_dtype = types.logits;
    given.X = X.tensor(), given.router_weight = weight.tensor();
  }
  static Problem random(const Size& size, const Types& types, uint32_t seed, int64_t gap = 0) {
    return {size, types, normal(size.T * size.d, 1.f, seed),
            normal(size.E * size.d, 1.f / std::sqrt(static_cast<float>(size.d)), seed + 1), gap};
  }
  RoutingSpec spec() const {
    RoutingSpec spec = RoutingSpec::top_k(Device::kCpu, size.T, size.E, size.K);
    spec.capacity = capacity;
    return spec;
  }
};

// The results of a call.
struct Result {
  std::vector<unsigned char> routing;
  std::vector<float> logits;  // (T, E)
  std::vector<int32_t> counts;
};

std::vector<unsigned char> bytes_of(Guarded& memory) {
  const auto* begin = static_cast<const unsigned char*>(memory.data());
  return {begin, begin + memory.bytes()};
}

Result route(Problem& problem, bool wants_logits = true, bool wants_counts = true) {
  const auto [T, d, E, K] = problem.size;
  const RoutingSpec spec = problem.spec();
  Guarded memory(spec.bytes()), workspace(spec.route_tokens_workspace_bytes(d));
  Matrix logits(problem.types.logits, T, E);
  std::vector<int32_t> counts(static_cast<size_t>(E) + 1, -77);
  Routing routing(spec, memory.data(), memory.bytes());
  TokenRouting given = problem.given;
  if (!problem.bias.empty()) given.router_bias = vector_of(problem.bias);
  if (!problem.selection_bias.empty()) given.selection_bias = vector_of(problem.selection_bias);
  if (wants_logits) given.logits = logits.tensor();
  if (wants_counts) given.expert_counts = {counts.data(), DType::kInt32, {E}};
  given.workspace = workspace.data(), given.workspace_bytes = workspace.bytes();
  routing.from_tokens(given);
  EXPECT_EQ(counts.back(), -77);
  counts.pop_back();
  return {bytes_of(memory), logits.values(), counts};
}

// The same by the calls that take logits.
Result compose(const Problem& problem, const std::vector<float>& values) {
  const auto [T, d, E, K] = problem.size;
  Matrix logits(values, problem.types.logits, T, E);
  const RoutingSpec spec = problem.spec();
  Guarded memory(spec.bytes()), workspace(spec.workspace_bytes());
  const auto pairs = static_cast<size_t>(T * K);
  std::vector<int32_t> ids(pairs), counts(static_cast<size_t>(E));
  std::vector<float> scores(pairs);
  const Tensor all_ids{ids.data(), DType::kInt32, {T, K}};
  const Tensor all_scores{scores.data(), DType::kFloat32, {T, K}};
  top_k({.device = Device::kCpu,
         .scoring = problem.given.scoring,
         .K = K,
         .logits = logits.tensor(),
         .selection_bias =
             problem.selection_bias.empty() ? ConstTensor() : vector_of(problem.selection_bias),
         .ids = all_ids,
         .scores = all_scores,
         .expert_counts = {counts.data(), DType::kInt32, {E}},
         .n_group = problem.given.n_group,
         .topk_group = problem.given.topk_group,
         .group_score = problem.given.group_score,
         .routed_scaling_factor = problem.given.routed_scaling_factor});
  Routing routing(spec, memory.data(), memory.bytes());
  routing.from_top_k(all_ids, all_scores, workspace.data(), workspace.bytes());
  return {bytes_of(memory), logits.values(), counts};
}

// Rounded to a dtype.
float rounded(float x, DType dtype) {
  Matrix one({x}, dtype, 1, 1);
  return one.get(0, 0);
}

// The order of docs/mathematics.md, column by column: a lane meets its columns in ascending order.
float logit_in_order(const float* x, const float* w, int64_t d) {
  float logit = 0.f;
  for (int64_t part = 0; part < d; part += 512) {
    std::vector<float> lane(32, 0.f);
    for (int64_t c = part; c < std::min(d, part + 512); ++c) {
      float& sum = lane[static_cast<size_t>(c % 256 / 8)];
      sum = std::fma(x[c], w[c], sum);
    }
    for (size_t half = 16; half > 0; half /= 2)
      for (size_t l = 0; l < half; ++l) lane[l] += lane[l + half];
    logit += lane[0];
  }
  return logit;
}

// The order of a GPU's warp: a lane has eight columns of a stretch at a time.
float logit_by_lanes(const float* x, const float* w, int64_t d) {
  float logit = 0.f;
  for (int32_t part = 0; part < decode::parts_of(d); ++part) {
    float lane[order::kSumLanes] = {};
    for (int l = 0; l < order::kSumLanes; ++l)
      for (int s = 0; s < decode::kStretches; ++s) {
        const int64_t first = decode::first_column(part, s, l);
        float xs[decode::kLaneColumns] = {}, ws[decode::kLaneColumns] = {};
        for (int i = 0; i < decode::kLaneColumns && first < d; ++i)
          xs[i] = x[first + i], ws[i] = w[first + i];
        lane[l] = decode::add_columns(xs, ws, lane[l]);
      }
    logit += order::add_lanes(lane);
  }
  return logit;
}

bool same(float a, float b) {
  return a == b || (std::isnan(a) && std::isnan(b));
}

const Size kSizes[] = {{1, 8, 1, 1},     {3, 16, 5, 2},    {2, 248, 8, 3},    {5, 256, 9, 9},
                       {4, 264, 17, 4},  {7, 512, 16, 1},  {2, 520, 40, 6},   {17, 1536, 24, 8},
                       {64, 2056, 8, 2}, {1, 4096, 64, 8}, {33, 1016, 12, 12}};

TEST(RouteTokens, LogitsHaveTheDocumentedOrder) {
  for (const Size& size : kSizes)
    for (const Types& types : kTypes)
      for (const bool biased : {false, true}) {
        SCOPED_TRACE(std::to_string(size.T) + " " + std::to_string(size.d) + " " +
                     std::to_string(size.E));
        Problem problem = Problem::random(size, types, 3, biased ? 8 : 0);
        if (biased) problem.bias = normal(size.E, 1.f, 5);
        const Result result = route(problem);
        const std::vector<float> x = problem.X.values(), w = problem.weight.values();
        for (int64_t t = 0; t < size.T; ++t)
          for (int64_t e = 0; e < size.E; ++e) {
            const float *row = x.data() + t * size.d, *column = w.data() + e * size.d;
            const auto at = static_cast<size_t>(e);
            float logit = logit_in_order(row, column, size.d);
            ASSERT_EQ(logit, logit_by_lanes(row, column, size.d));
            if (biased) logit += problem.bias[at];
            ASSERT_EQ(result.logits[static_cast<size_t>(t * size.E + e)],
                      rounded(logit, types.logits))
                << "token " << t << ", expert " << e;
          }
      }
}

TEST(RouteTokens, LogitsAreClose) {
  const Size size{9, 4096, 32, 4};
  Problem problem = Problem::random(size, kTypes[0], 7);
  const Result result = route(problem);
  const std::vector<float> x = problem.X.values(), w = problem.weight.values();
  double error = 0, norm = 0;
  for (int64_t t = 0; t < size.T; ++t)
    for (int64_t e = 0; e < size.E; ++e) {
      double logit = 0;
      for (int64_t c = 0; c < size.d; ++c)
        logit += double{x[static_cast<size_t>(t * size.d + c)]} *
                 double{w[static_cast<size_t>(e * size.d + c)]};
      const double found = result.logits[static_cast<size_t>(t * size.E + e)];
      error += (found - logit) * (found - logit), norm += logit * logit;
    }
  EXPECT_TRUE(std::sqrt(error / norm) <= 3e-7) << std::sqrt(error / norm);
}

// Prescribed logits: expert e has columns e and E' + e, each of which contributes 4 times the
// token's number. Infinity and NaN result from numbers that overflow times four.
Problem with_logits(const Size& size, const Types& types, const std::vector<float>& logits) {
  const int64_t width = (size.E + 7) / 8 * 8, d = 2 * width;
  const auto largest = types.X == DType::kFloat32 ? 3.4e38f : 3.38e38f;
  std::vector<float> x(static_cast<size_t>(size.T * d)), w(static_cast<size_t>(size.E * d));
  for (int64_t e = 0; e < size.E; ++e)
    w[static_cast<size_t>(e * d + e)] = w[static_cast<size_t>(e * d + width + e)] = 4.f;
  for (int64_t t = 0; t < size.T; ++t)
    for (int64_t e = 0; e < size.E; ++e) {
      const float wish = logits[static_cast<size_t>(t * size.E + e)];
      const auto at = static_cast<size_t>(t * d + e), other = at + static_cast<size_t>(width);
      if (std::isnan(wish))
        x[at] = largest, x[other] = -largest;
      else
        x[at] = std::isinf(wish) ? std::copysign(largest, wish) : wish / 4;
    }
  return {{size.T, d, size.E, size.K}, types, x, w};
}

bool by_sigmoid(Scoring scoring) {
  return scoring == Scoring::kSigmoid || scoring == Scoring::kSigmoidRenormalized;
}

void expect_composed(Problem& problem) {
  const Result result = route(problem), expected = compose(problem, result.logits);
  EXPECT_TRUE(result.routing == expected.routing);
  EXPECT_EQ(result.counts, expected.counts);
  EXPECT_TRUE(route(problem, false, false).routing == result.routing) << "without the outputs";
}

TEST(RouteTokens, IsTopKAndTheRoutingOfItsLogits) {
  const Size sizes[] = {
      {1, 0, 8, 3}, {5, 0, 7, 7}, {64, 0, 40, 8}, {31, 0, 130, 5}, {20, 0, 512, 32}};
  for (const Size& size : sizes)
    for (const Scoring scoring : kScorings)
      for (const Logits kind : {Logits::kNormal, Logits::kTies, Logits::kSpecial, Logits::kSkewed})
        for (const Types& types : {kTypes[0], kTypes[1]}) {
          SCOPED_TRACE(name(kind));
          const std::vector<float> wishes = make_logits(kind, size.T, size.E);
          Problem problem = with_logits(size, types, wishes);
          problem.given.scoring = scoring;
          problem.given.routed_scaling_factor = 2.5f;
          if (by_sigmoid(scoring)) problem.selection_bias = normal(size.E, .1f, 11);
          expect_composed(problem);
          if (types.X != DType::kFloat32) continue;
          const Result result = route(problem);
          for (size_t i = 0; i < wishes.size(); ++i)
            ASSERT_TRUE(same(result.logits[i], wishes[i])) << i << ": " << result.logits[i];
        }
}

TEST(RouteTokens, KeepsToItsGroups) {
  for (const Scoring scoring : {Scoring::kSigmoidRenormalized, Scoring::kSoftmaxOverAll}) {
    const Size size{20, 0, 64, 6};
    Problem problem = with_logits(size, kTypes[0], make_logits(Logits::kTies, size.T, size.E));
    problem.given.scoring = scoring;
    problem.given.n_group = 8, problem.given.topk_group = 3;
    problem.given.group_score = by_sigmoid(scoring) ? GroupScore::kTop2Sum : GroupScore::kMax;
    expect_composed(problem);
  }
}

TEST(RouteTokens, DropsWhatPassesTheCapacity) {
  for (const int64_t capacity : {1, 37, 64, 127}) {
    Problem problem = Problem::random({16, 64, 12, 8}, kTypes[1], 13);
    problem.capacity = capacity;
    expect_composed(problem);
  }
}

TEST(RouteTokens, OfNoTokens) {
  Problem problem = Problem::random({0, 64, 6, 2}, kTypes[0], 1);
  expect_composed(problem);
}

TEST(RouteTokens, ABiasOf16BitsIsWidened) {
  Problem problem = Problem::random({6, 40, 8, 2}, kTypes[1], 17);
  const Result without = route(problem);
  std::vector<float> bias = normal(8, 1.f, 19);
  for (float& each : bias) each = rounded(each, DType::kBFloat16);
  problem.bias = bias;
  const Result wide = route(problem);
  problem.bias.clear();
  Matrix narrow(bias, DType::kBFloat16, 1, 8);
  ConstTensor vector = narrow.tensor();
  vector.ndim = 1, vector.shape[0] = 8, vector.stride[0] = 1;
  problem.given.router_bias = vector;
  const Result result = route(problem);
  EXPECT_EQ(result.logits, wide.logits);
  EXPECT_NE(result.logits, without.logits);
}

// A token's logits do not depend on the other tokens or on its place.
TEST(RouteTokens, DoesNotDependOnOtherTokens) {
  const Size size{23, 1544, 20, 3};
  Problem all = Problem::random(size, kTypes[1], 23);
  const std::vector<float> logits = route(all).logits, x = all.X.values();
  for (const int64_t t : {0, 3, 15, 16, 22}) {
    const std::vector<float> alone(x.begin() + t * size.d, x.begin() + (t + 1) * size.d);
    Problem one({1, size.d, size.E, size.K}, kTypes[1], alone, all.weight.values());
    EXPECT_EQ(route(one).logits, row_of_logits(logits, t, size.E)) << "token " << t;
  }
}

// The places of pairs from sets of tokens, as a GPU's block has them, are those of the routing.
TEST(RouteTokens, SetsOfTokensGiveThePlaces) {
  for (const Size& size : {Size{64, 64, 9, 4}, Size{33, 64, 40, 8}, Size{32, 64, 3, 3}}) {
    Problem problem = Problem::random(size, kTypes[0], 29);
    const Result result = route(problem);
    std::vector<std::vector<uint32_t>> tokens(static_cast<size_t>(size.E),
                                              std::vector<uint32_t>(decode::TokenSet::kWords));
    Guarded memory(problem.spec().bytes());
    std::memcpy(memory.data(), result.routing.data(), result.routing.size());
    const Routing routing(problem.spec(), memory.data(), memory.bytes());
    const auto expert_of = [&](int64_t pair) {
      const int32_t *const begin = routing.offsets, *const end = begin + size.E + 1;
      return std::upper_bound(begin, end, routing.pair_row[pair]) - begin - 1;
    };
    for (int64_t pair = 0; pair < size.T * size.K; ++pair) {
      const auto t = static_cast<int32_t>(pair / size.K);
      tokens[static_cast<size_t>(expert_of(pair))]
            [static_cast<size_t>(decode::TokenSet::word_of(t))] |= decode::TokenSet::bit_of(t);
    }
    for (int64_t pair = 0; pair < size.T * size.K; ++pair) {
      const int64_t e = expert_of(pair);
      const auto word = [&](int w) {
        return tokens[static_cast<size_t>(e)][static_cast<size_t>(w)];
      };
      const auto t = static_cast<int32_t>(pair / size.K);
      EXPECT_EQ(routing.pair_row[pair],
                routing.offsets[e] + decode::TokenSet::count_before(t, word));
      EXPECT_EQ(routing.offsets[e + 1] - routing.offsets[e], decode::TokenSet::count(word));
    }
  }
}

}  // namespace
}  // namespace tilemoe::routing_test
