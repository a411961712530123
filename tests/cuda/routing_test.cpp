// The routing steps on the device against the CPU's, through the public interface: every byte of
// ids, scores, counts and of the routing's memory is the same, including poison where nothing is
// written.
#include "cuda/twin_routing.h"
#include "routing_support.h"

namespace tilemoe::test {
namespace {

using routing_test::Logits;
using routing_test::make_logits;

void expect_same(TwinTensor& tensor, const char* what) {
  EXPECT_TRUE(tensor.buffer().download() == tensor.buffer().host_bytes()) << what << " differ";
}

// Row t of a tensor wider than E has the logits of token t, then a gap.
void fill_logits(TwinTensor& logits, Logits kind, int64_t T, int64_t width, uint32_t seed = 1) {
  const std::vector<float> values = make_logits(kind, T, width, seed);
  logits.fill([&](int64_t i) { return static_cast<double>(values[static_cast<size_t>(i)]); });
}

// ------------------------------------------------------------------ top-K

struct TopKCase {
  int64_t T, E, K;
  Logits logits = Logits::kNormal;
  tilemoe_dtype dtype = TILEMOE_FLOAT32;
  tilemoe_dtype id_dtype = TILEMOE_INT32;
  tilemoe_scoring scoring = TILEMOE_SOFTMAX_OVER_CHOSEN;
  bool bias = false;
  int64_t gap = 0;
  int64_t n_group = 1, topk_group = 1;
  tilemoe_group_score group_score = TILEMOE_GROUP_MAX;
  float factor = 1;
};

std::string describe(const TopKCase& c) {
  return "T " + std::to_string(c.T) + " E " + std::to_string(c.E) + " K " + std::to_string(c.K) +
         " " + routing_test::name(c.logits) + " " + tilemoe_dtype_name(c.dtype) + " " +
         tilemoe_dtype_name(c.id_dtype) + " scoring " + std::to_string(c.scoring) +
         (c.bias ? " biased" : "") + " groups " + std::to_string(c.n_group) + " score " +
         std::to_string(c.group_score);
}

void expect_same_top_k(const TopKCase& c) {
  SCOPED_TRACE(describe(c));
  TwinTensor logits(c.dtype, {c.T, c.E + c.gap}), bias(TILEMOE_FLOAT32, {c.E});
  TwinTensor ids(c.id_dtype, {c.T, c.K}), scores(TILEMOE_FLOAT32, {c.T, c.K});
  TwinTensor counts(TILEMOE_INT32, {c.E});
  fill_logits(logits, c.logits, c.T, c.E + c.gap);
  // Whole numbers tie once a sigmoid is added; a NaN in the bias ranks its expert last.
  bias.fill([&](int64_t e) {
    return e % 11 == 7 ? static_cast<double>(routing_test::kNaN) : static_cast<double>(e % 3);
  });
  for (const bool device : {false, true}) {
    auto args = sized<tilemoe_top_k_args>();
    args.device = device ? TILEMOE_CUDA : TILEMOE_CPU;
    args.scoring = c.scoring;
    args.K = c.K;
    args.logits = logits.on(device);
    args.logits.shape[1] = c.E;
    if (c.bias) args.selection_bias = bias.on(device);
    args.ids = ids.on(device), args.scores = scores.on(device);
    args.expert_counts = counts.on(device);
    args.n_group = c.n_group, args.topk_group = c.topk_group, args.group_score = c.group_score;
    args.routed_scaling_factor = c.factor;
    expect_ok(tilemoe_top_k(&args));
  }
  expect_cuda(cudaDeviceSynchronize(), "top-K");
  expect_same(ids, "ids"), expect_same(scores, "scores"), expect_same(counts, "counts");
}

constexpr tilemoe_scoring kScorings[] = {TILEMOE_SOFTMAX_OVER_CHOSEN, TILEMOE_SOFTMAX_OVER_ALL,
                                         TILEMOE_SOFTMAX_RENORMALIZED, TILEMOE_SIGMOID,
                                         TILEMOE_SIGMOID_RENORMALIZED};
constexpr Logits kLogits[] = {Logits::kNormal, Logits::kTies, Logits::kSpecial, Logits::kSkewed};

// Every rule by a warp and by a block, with every kind of logits.
TEST(CudaRouting, TopKOfEveryRule) {
  const std::pair<int64_t, int64_t> sizes[] = {{1, 1},    {7, 3},     {32, 32}, {40, 8},
                                               {100, 33}, {129, 6},   {257, 2}, {512, 32},
                                               {512, 40}, {1000, 17}, {513, 1}, {600, 600}};
  for (const auto& [E, K] : sizes)
    for (const tilemoe_scoring scoring : kScorings)
      for (const Logits logits : kLogits)
        for (const bool bias : {false, true})
          if (!bias || scoring >= TILEMOE_SIGMOID)
            expect_same_top_k(
                {.T = 37, .E = E, .K = K, .logits = logits, .scoring = scoring, .bias = bias});
}

TEST(CudaRouting, TopKOfEveryType) {
  for (const tilemoe_dtype dtype : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    for (const tilemoe_dtype id_dtype : {TILEMOE_INT32, TILEMOE_INT64})
      for (const auto& [E, K] :
           {std::pair<int64_t, int64_t>{9, 9}, {40, 8}, {96, 8}, {256, 16}, {500, 32}, {1024, 9}})
        for (const Logits logits : {Logits::kNormal, Logits::kTies, Logits::kSpecial})
          for (const tilemoe_scoring scoring : {TILEMOE_SOFTMAX_OVER_ALL, TILEMOE_SIGMOID})
            expect_same_top_k({.T = 301,
                               .E = E,
                               .K = K,
                               .logits = logits,
                               .dtype = dtype,
                               .id_dtype = id_dtype,
                               .scoring = scoring,
                               .gap = 16});
}

TEST(CudaRouting, TopKOfUnusualSizes) {
  for (const int64_t T : {0, 1, 2, 5, 2113})
    for (const auto& [E, K] : {std::pair<int64_t, int64_t>{128, 8}, {640, 5}})
      expect_same_top_k({.T = T, .E = E, .K = K});
  for (const Logits logits : kLogits)
    for (const int64_t K : {1, 8, 4095, 4096})
      for (const tilemoe_scoring scoring : {TILEMOE_SOFTMAX_OVER_ALL, TILEMOE_SIGMOID})
        expect_same_top_k({.T = 9, .E = 4096, .K = K, .logits = logits, .scoring = scoring});
  // One lane of a warp has all of the best, and more of them than it gathers at once.
  for (const tilemoe_dtype dtype : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16})
    for (const int64_t K : {1, 20, 32})
      expect_same_top_k(
          {.T = 40, .E = 8000, .K = K, .logits = Logits::kStriped, .dtype = dtype, .gap = 3});
  for (const int64_t E : {1023, 1024, 1025, 16384, 16385})
    expect_same_top_k({.T = 20, .E = E, .K = 12, .gap = 1});
  // Past what shared memory holds, the chosen are sorted where they are written.
  for (const tilemoe_dtype id_dtype : {TILEMOE_INT32, TILEMOE_INT64})
    for (const int64_t K : {8192, 8193, 20000})
      expect_same_top_k(
          {.T = 2, .E = 20000, .K = K, .logits = Logits::kTies, .id_dtype = id_dtype});
  expect_same_top_k({.T = 2, .E = 200000, .K = 11, .logits = Logits::kTies});
}

// Groups by a warp and by a block: of 32 experts, of fewer and more, of sizes that no lane divides.
TEST(CudaRouting, TopKInGroups) {
  struct Size {
    int64_t E, K, n_group, topk_group;
  };
  constexpr Size kSizes[] = {{256, 8, 8, 4},  {160, 6, 8, 3},  {12, 6, 3, 2},    {64, 4, 32, 7},
                             {6, 1, 3, 1},    {96, 32, 3, 2},  {512, 20, 16, 5}, {384, 8, 2, 1},
                             {300, 40, 5, 2}, {513, 3, 27, 2}, {4096, 8, 32, 2}, {1000, 9, 10, 9}};
  for (const auto& [E, K, n_group, topk_group] : kSizes)
    for (const tilemoe_scoring scoring : kScorings)
      for (const Logits logits : kLogits)
        for (const tilemoe_group_score score : {TILEMOE_GROUP_TOP2_SUM, TILEMOE_GROUP_MAX})
          for (const tilemoe_dtype dtype : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16}) {
            const bool sigmoid = scoring >= TILEMOE_SIGMOID;
            if (score == TILEMOE_GROUP_TOP2_SUM && !sigmoid) continue;
            expect_same_top_k({.T = 41,
                               .E = E,
                               .K = K,
                               .logits = logits,
                               .dtype = dtype,
                               .scoring = scoring,
                               .bias = sigmoid,
                               .gap = 1,
                               .n_group = n_group,
                               .topk_group = topk_group,
                               .group_score = score,
                               .factor = 2.5f});
          }
  for (const int64_t T : {0, 1, 5, 2113})
    expect_same_top_k(
        {.T = T, .E = 256, .K = 8, .scoring = TILEMOE_SIGMOID, .n_group = 8, .topk_group = 4});
}

void expect_same_scores(const TopKCase& c) {
  SCOPED_TRACE(describe(c));
  TwinTensor logits(c.dtype, {c.T, c.E + c.gap}), ids(c.id_dtype, {c.T, c.K});
  TwinTensor scores(TILEMOE_FLOAT32, {c.T, c.K}), counts(TILEMOE_INT32, {c.E});
  fill_logits(logits, c.logits, c.T, c.E + c.gap);
  verify::Random random(3, 1);
  ids.fill([&](int64_t) { return static_cast<double>(random.below(c.E + 3)) - 1; });
  for (const bool device : {false, true}) {
    auto args = sized<tilemoe_top_k_scores_args>();
    args.device = device ? TILEMOE_CUDA : TILEMOE_CPU;
    args.scoring = c.scoring;
    args.routed_scaling_factor = c.factor;
    args.logits = logits.on(device);
    args.logits.shape[1] = c.E;
    args.ids = ids.on(device), args.scores = scores.on(device);
    args.expert_counts = counts.on(device);
    expect_ok(tilemoe_top_k_scores(&args));
  }
  expect_cuda(cudaDeviceSynchronize(), "scores of chosen experts");
  expect_same(scores, "scores"), expect_same(counts, "counts");
}

TEST(CudaRouting, ScoresOfGivenIds) {
  for (const auto& [E, K] :
       {std::pair<int64_t, int64_t>{1, 1}, {8, 2}, {40, 8}, {100, 33}, {600, 600}, {4096, 70}})
    for (const tilemoe_scoring scoring : kScorings)
      for (const Logits logits : kLogits)
        for (const tilemoe_dtype dtype : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
          expect_same_scores({.T = 37,
                              .E = E,
                              .K = K,
                              .logits = logits,
                              .dtype = dtype,
                              .id_dtype = K % 2 == 0 ? TILEMOE_INT32 : TILEMOE_INT64,
                              .scoring = scoring,
                              .gap = 3,
                              .factor = 2.5f});
  for (const int64_t T : {0, 1, 9000}) expect_same_scores({.T = T, .E = 64, .K = 6});
}

// ------------------------------------------------------------- from pairs

tilemoe_routing_spec spec_of(tilemoe_routing_kind kind, int64_t T, int64_t E) {
  auto spec = sized<tilemoe_routing_spec>();
  spec.kind = kind;
  spec.T = T, spec.E = E;
  return spec;
}

struct PairsCase {
  int64_t T, E, K;
  int64_t capacity = 0;
  tilemoe_dtype id_dtype = TILEMOE_INT32;
  tilemoe_dtype score_dtype = TILEMOE_FLOAT32;
  int64_t used = 0;      // experts that ids name; 0: all
  int64_t bad_each = 0;  // one id in `bad_each` is bad; 0: none
  int64_t nan_each = 0;  // one score in `nan_each` is NaN; 0: none
};

double any_id(verify::Random& random, const PairsCase& c) {
  const double bad[] = {-1., static_cast<double>(c.E), -2147483648., 2147483647.};
  if (c.bad_each > 0 && random.below(c.bad_each) == 0) return bad[random.below(4)];
  return static_cast<double>(random.below(c.used > 0 ? c.used : c.E));
}
double any_score(verify::Random& random, const PairsCase& c) {
  if (c.nan_each > 0 && random.below(c.nan_each) == 0)
    return static_cast<double>(routing_test::kNaN);
  return static_cast<double>(random.below(1000)) / 1024;
}

void route_pairs(const PairsCase& c, TwinRouting& twin, uint64_t seed) {
  SCOPED_TRACE("T " + std::to_string(c.T) + " E " + std::to_string(c.E) + " K " +
               std::to_string(c.K) + " seed " + std::to_string(seed));
  TwinTensor ids(c.id_dtype, {c.T, c.K}), scores(c.score_dtype, {c.T, c.K});
  verify::Random random(seed, 1);
  ids.fill([&](int64_t) { return any_id(random, c); });
  scores.fill([&](int64_t) { return any_score(random, c); });
  twin.build([&](bool device, tilemoe_routing& routing, void* workspace, size_t bytes) {
    auto args = sized<tilemoe_route_top_k_args>();
    args.ids = ids.on(device), args.scores = scores.on(device);
    args.workspace = workspace, args.workspace_bytes = bytes;
    expect_ok(tilemoe_route_top_k(&routing, &args));
  });
}

tilemoe_routing_spec spec_of(const PairsCase& c) {
  tilemoe_routing_spec spec = spec_of(TILEMOE_ROUTING_TOP_K, c.T, c.E);
  spec.K = c.K, spec.capacity = c.capacity;
  return spec;
}

TEST(CudaRouting, FromPairs) {
  const PairsCase cases[] = {
      {.T = 0, .E = 5, .K = 2},
      {.T = 1, .E = 1, .K = 1},
      {.T = 1, .E = 4096, .K = 4096},
      {.T = 1023, .E = 3, .K = 1, .nan_each = 9},
      {.T = 1000, .E = 64, .K = 6, .bad_each = 5, .nan_each = 7},
      {.T = 1000, .E = 64, .K = 6, .capacity = 4097, .bad_each = 11},
      {.T = 1000, .E = 64, .K = 6, .capacity = 1, .bad_each = 11},
      {.T = 1000, .E = 64, .K = 6, .capacity = 9000},
      {.T = 1000, .E = 64, .K = 6, .bad_each = 1},
      {.T = 5000, .E = 300, .K = 7, .used = 1},
      {.T = 5000, .E = 300, .K = 7, .capacity = 20000, .used = 2, .nan_each = 2},
      {.T = 3001, .E = 1376, .K = 9},  // what place_pairs places at once
      {.T = 3001, .E = 1377, .K = 9, .bad_each = 50},
      {.T = 3001, .E = 2048, .K = 9},
      {.T = 3001, .E = 2049, .K = 9, .bad_each = 50},
      {.T = 3001, .E = 4096, .K = 9, .capacity = 26000, .nan_each = 40},
      {.T = 777, .E = 20000, .K = 3, .bad_each = 50, .nan_each = 40},
      {.T = 32768, .E = 256, .K = 16, .bad_each = 1000, .nan_each = 1000},
      {.T = 100000, .E = 8, .K = 8},
  };
  for (const PairsCase& c : cases) {
    TwinRouting twin(spec_of(c));
    route_pairs(c, twin, 1);
    route_pairs(c, twin, 2);  // in memory that holds another routing
    if (c.bad_each > 0) {
      EXPECT_GT(twin.counter(TILEMOE_COUNT_BAD_IDS), 0);
    }
    if (c.nan_each > 0) {
      EXPECT_GT(twin.counter(TILEMOE_COUNT_NAN_TOKENS), 0);
    }
  }
}

TEST(CudaRouting, FromPairsOfEveryType) {
  for (const tilemoe_dtype id_dtype : {TILEMOE_INT32, TILEMOE_INT64})
    for (const tilemoe_dtype score_dtype : {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16}) {
      const PairsCase c{.T = 999,
                        .E = 40,
                        .K = 5,
                        .id_dtype = id_dtype,
                        .score_dtype = score_dtype,
                        .bad_each = 20,
                        .nan_each = 20};
      TwinRouting twin(spec_of(c));
      route_pairs(c, twin, 3);
      EXPECT_EQ(twin.rows() + twin.counter(TILEMOE_COUNT_BAD_IDS), c.T * c.K);
    }
}

// An int64 id must not be cut to 32 bits before it is checked.
TEST(CudaRouting, WideIdsAreCheckedWhole) {
  const PairsCase c{.T = 64, .E = 16, .K = 4, .id_dtype = TILEMOE_INT64};
  TwinTensor ids(c.id_dtype, {c.T, c.K}), scores(c.score_dtype, {c.T, c.K});
  ids.fill([](int64_t i) { return static_cast<double>(i % 16) + (i % 3 == 0 ? 4294967296. : 0.); });
  scores.fill([](int64_t) { return 0.5; });
  TwinRouting twin(spec_of(c));
  twin.build([&](bool device, tilemoe_routing& routing, void* workspace, size_t bytes) {
    auto args = sized<tilemoe_route_top_k_args>();
    args.ids = ids.on(device), args.scores = scores.on(device);
    args.workspace = workspace, args.workspace_bytes = bytes;
    expect_ok(tilemoe_route_top_k(&routing, &args));
  });
  EXPECT_EQ(twin.counter(TILEMOE_COUNT_BAD_IDS), 86);
}

// ----------------------------------------------------------- from triples

TEST(CudaRouting, FromTriples) {
  struct Triples {
    PairsCase pairs;  // K is not used
    int64_t count;
    int64_t disorder_each;  // one token in this many is anywhere, in range or not; 0: none
  };
  const Triples cases[] = {
      {{.T = 5, .E = 3, .K = 0}, 0, 0},
      {{.T = 0, .E = 3, .K = 0}, 40, 0},
      {{.T = 1, .E = 3, .K = 0, .nan_each = 3}, 1500, 0},
      {{.T = 700, .E = 30, .K = 0, .bad_each = 3, .nan_each = 4}, 4000, 9},
      {{.T = 700, .E = 30, .K = 0, .capacity = 1000, .bad_each = 8}, 4000, 0},
      {{.T = 100000, .E = 17, .K = 0}, 300, 0},
      {{.T = 100, .E = 3000, .K = 0, .bad_each = 9, .nan_each = 9}, 30000, 1000},
      {{.T = 9000, .E = 64, .K = 0, .bad_each = 1}, 20000, 7},
      {{.T = 20000, .E = 128, .K = 0, .used = 3, .bad_each = 2}, 250000, 100},
  };
  for (const auto& [c, count, disorder_each] : cases)
    for (const tilemoe_dtype dtype : {TILEMOE_INT32, TILEMOE_INT64}) {
      SCOPED_TRACE("T " + std::to_string(c.T) + " pairs " + std::to_string(count));
      tilemoe_routing_spec spec = spec_of(TILEMOE_ROUTING_GENERAL, c.T, c.E);
      spec.pairs = count, spec.capacity = c.capacity;
      TwinTensor tokens(dtype, {count}), experts(dtype, {count}), scores(TILEMOE_FLOAT32, {count});
      verify::Random random(11, 1);
      tokens.fill([&](int64_t i) {
        if (disorder_each > 0 && random.below(disorder_each) == 0)
          return static_cast<double>(random.below(c.T + 20)) - 10;
        return static_cast<double>(i * c.T / count);
      });
      experts.fill([&](int64_t) { return any_id(random, c); });
      scores.fill([&](int64_t) { return any_score(random, c); });
      TwinRouting twin(spec);
      for (int use = 0; use < 2; ++use)
        twin.build([&](bool device, tilemoe_routing& routing, void* workspace, size_t bytes) {
          auto args = sized<tilemoe_route_general_args>();
          args.tokens = tokens.on(device), args.experts = experts.on(device);
          args.scores = scores.on(device);
          args.workspace = workspace, args.workspace_bytes = bytes;
          expect_ok(tilemoe_route_general(&routing, &args));
        });
    }
}

// ------------------------------------------------------------- from counts

TEST(CudaRouting, FromCounts) {
  verify::Random random(2, 2);
  for (const int64_t E : {1, 7, 1024, 1025, 5000})
    for (const int64_t capacity : {0, 1, 1000, 40000})
      for (const tilemoe_dtype dtype : {TILEMOE_INT32, TILEMOE_INT64})
        for (const bool scored : {false, true}) {
          SCOPED_TRACE("E " + std::to_string(E) + " capacity " + std::to_string(capacity));
          tilemoe_routing_spec spec = spec_of(TILEMOE_ROUTING_GROUPED, 0, E);
          spec.capacity = capacity;
          TwinTensor counts(dtype, {E}), scores(TILEMOE_FLOAT32, {capacity});
          counts.fill([&](int64_t e) {
            if (dtype == TILEMOE_INT64 && E == 1025 && e == 1000) return 1e15;
            return static_cast<double>(random.below(20)) - 4;
          });
          scores.fill([&](int64_t) { return static_cast<double>(random.below(100)); });
          TwinRouting twin(spec);
          for (int use = 0; use < 2; ++use)
            twin.build([&](bool device, tilemoe_routing& routing, void*, size_t) {
              auto args = sized<tilemoe_route_grouped_args>();
              args.counts = counts.on(device);
              if (scored) args.scores = scores.on(device);
              expect_ok(tilemoe_route_grouped(&routing, &args));
            });
        }
}

// ------------------------------------------------- both, in a captured graph

TEST(CudaRouting, ReplaysFromAGraph) {
  const int64_t T = 24576, E = 128, K = 8;
  TwinTensor logits(TILEMOE_FLOAT32, {T, E}), ids(TILEMOE_INT32, {T, K});
  TwinTensor scores(TILEMOE_FLOAT32, {T, K}), counts(TILEMOE_INT32, {E});
  tilemoe_routing_spec spec = spec_of(TILEMOE_ROUTING_TOP_K, T, E);
  spec.K = K;
  TwinRouting twin(spec);
  cudaStream_t stream = nullptr;
  expect_cuda(cudaStreamCreate(&stream), "stream");
  cudaGraph_t graph = nullptr;
  cudaGraphExec_t replay = nullptr;
  const auto run = [&](bool device, tilemoe_routing& routing, void* workspace, size_t bytes) {
    auto choose = sized<tilemoe_top_k_args>();
    choose.device = device ? TILEMOE_CUDA : TILEMOE_CPU;
    choose.K = K;
    choose.logits = logits.on(device), choose.ids = ids.on(device);
    choose.scores = scores.on(device), choose.expert_counts = counts.on(device);
    choose.stream = stream;
    auto route = sized<tilemoe_route_top_k_args>();
    route.ids = choose.ids, route.scores = choose.scores;
    route.workspace = workspace, route.workspace_bytes = bytes, route.stream = stream;
    const bool capture = device && replay == nullptr;
    if (capture)
      expect_cuda(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal), "capture");
    if (capture || !device) {
      expect_ok(tilemoe_top_k(&choose));
      expect_ok(tilemoe_route_top_k(&routing, &route));
    }
    if (capture) {
      expect_cuda(cudaStreamEndCapture(stream, &graph), "capture");
      expect_cuda(cudaGraphInstantiate(&replay, graph, 0), "graph");
    }
    if (device) expect_cuda(cudaGraphLaunch(replay, stream), "replay");
  };
  for (uint32_t seed = 1; seed <= 3; ++seed) {
    fill_logits(logits, Logits::kSkewed, T, E, seed);
    twin.build(run);
    expect_same(ids, "ids"), expect_same(scores, "scores"), expect_same(counts, "counts");
    for (int again = 0; again < 20; ++again) {
      expect_cuda(cudaGraphLaunch(replay, stream), "replay");
      expect_cuda(cudaStreamSynchronize(stream), "replay");
      twin.expect_same("replayed");
    }
  }
  cudaGraphExecDestroy(replay), cudaGraphDestroy(graph), cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace tilemoe::test
