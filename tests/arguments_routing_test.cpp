// The calls that build a routing, each argument wrong in every way.
#include <cmath>
#include <memory>

#include "arguments_routing_problem.h"

namespace tilemoe::arguments {
namespace {

// The args struct of a newer version: 8 bytes more, the last of which is not zero.
template <class Args>
std::vector<uint64_t> grow(const Args& args) {
  static_assert(sizeof args % sizeof(uint64_t) == 0);
  std::vector<uint64_t> grown(sizeof args / sizeof(uint64_t) + 1);
  std::memcpy(grown.data(), &args, sizeof args);
  grown.front() = sizeof args + sizeof(uint64_t);
  reinterpret_cast<unsigned char*>(&grown.back())[7] = 1;
  return grown;
}

// The routing and the args struct of a call that builds.
template <class Problem>
std::vector<BadCase<Problem>> building_cases() {
  return {
      {"args null", [](Problem& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"args.struct_size too small",
       [](Problem& p) { p.args.struct_size = 8; },
       {"args.struct_size is 8", "sizeof"}},
      {"args grown, and something in what they grew by",
       [](Problem& p) {
         p.grown_args = grow(p.args);
         p.args_pointer = reinterpret_cast<decltype(p.args_pointer)>(p.grown_args.data());
       },
       {"args.struct_size is " + std::to_string(sizeof(Problem::args) + 8), "newer version"}},
      {"routing null", [](Problem& p) { p.routing_pointer = nullptr; }, {"routing is null"}},
      {"routing zeroed", [](Problem& p) { p.routing = {}; }, {"routing.struct_size is 0"}},
      {"routing never bound",
       [](Problem& p) {
         const tilemoe_routing_spec spec = p.routing.spec;
         p.routing = {};
         p.routing.struct_size = sizeof p.routing, p.routing.spec = spec;
       },
       {"routing", "bind"}},
      {"routing of another kind",
       [](Problem& p) {
         auto other = p.routing.spec.kind == TILEMOE_ROUTING_GROUPED ? TILEMOE_ROUTING_GENERAL
                                                                     : TILEMOE_ROUTING_GROUPED;
         p.other = std::make_unique<RoutingProblem>(other);
         p.routing = p.other->routing;
       },
       {"kind"}},
      {"capacity grown", [](Problem& p) { p.routing.spec.capacity += 64; }, {"routing"}},
      {"E grown", [](Problem& p) { p.routing.spec.E += 64; }, {"routing"}},
      {"device cuda",
       [](Problem& p) { p.routing.spec.device = TILEMOE_CUDA; },
       {"CUDA"},
       TILEMOE_UNSUPPORTED},
      {"device 5", [](Problem& p) { p.routing.spec.device = tilemoe_device(5); }, {"device is 5"}},
  };
}

struct RouteTopK : RoutingProblem {
  tilemoe_route_top_k_args args{};
  tilemoe_routing* routing_pointer = &routing;
  const tilemoe_route_top_k_args* args_pointer = &args;
  std::unique_ptr<RoutingProblem> other;
  std::vector<uint64_t> grown_args;

  RouteTopK() : RoutingProblem(TILEMOE_ROUTING_TOP_K) {
    args.struct_size = sizeof args;
    args.ids = new_tensor(arena, TILEMOE_INT32, {kT, kK});
    args.scores = new_tensor(arena, TILEMOE_FLOAT32, {kT, kK});
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    return name == "ids" ? is_integer(dtype) : is_float(dtype);
  }
  const char* function() const { return "tilemoe_route_top_k"; }
  tilemoe_status call() { return tilemoe_route_top_k(routing_pointer, args_pointer); }
};

TEST(RoutingArguments, RouteTopK) {
  auto cases = building_cases<RouteTopK>();
  append_tensor(cases, "ids", &tilemoe_route_top_k_args::ids);
  append_tensor(cases, "scores", &tilemoe_route_top_k_args::scores);
  append_workspace(cases);
  run_cases(cases);
}

constexpr int64_t kD = 24;

template <tilemoe_scoring kScoring>
struct RouteTokens : RoutingProblem {
  tilemoe_route_tokens_args args{};
  tilemoe_routing* routing_pointer = &routing;
  const tilemoe_route_tokens_args* args_pointer = &args;
  std::unique_ptr<RoutingProblem> other;
  std::vector<uint64_t> grown_args;

  RouteTokens() : RoutingProblem(TILEMOE_ROUTING_TOP_K) {
    args.struct_size = sizeof args;
    args.scoring = kScoring;
    args.X = new_tensor(arena, TILEMOE_FLOAT32, {kT, kD});
    args.router_weight = new_tensor(arena, TILEMOE_FLOAT32, {kE, kD});
    args.router_bias = new_tensor(arena, TILEMOE_FLOAT32, {kE});
    if (kScoring == TILEMOE_SIGMOID) args.selection_bias = new_tensor(arena, TILEMOE_FLOAT32, {kE});
    args.logits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    args.expert_counts = new_tensor(arena, TILEMOE_INT32, {kE});
    require(tilemoe_route_tokens_workspace_bytes(&spec, kD, &args.workspace_bytes));
    args.workspace = arena.take(args.workspace_bytes);
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    if (name == "X" || name == "router_bias") return is_float(dtype);
    return dtype == (name == "expert_counts" ? TILEMOE_INT32 : TILEMOE_FLOAT32);
  }
  const char* function() const { return "tilemoe_route_tokens"; }
  tilemoe_status call() { return tilemoe_route_tokens(routing_pointer, args_pointer); }
};

// Its width is X's own, so a wrong one may show at another tensor.
template <class Problem>
void append_X(std::vector<BadCase<Problem>>& cases) {
  const Argument<Problem> X{"X", [](Problem& p) -> tilemoe_tensor& { return p.args.X; },
                            Layout::kRows, false, true};
  for (auto bad : tensor_cases(X)) {
    if (bad.name.find("shape[1]") != std::string::npos) bad.words.clear();
    cases.push_back(bad);
  }
}

template <class Problem>
std::vector<BadCase<Problem>> token_cases() {
  auto cases = building_cases<Problem>();
  append(
      cases,
      {{"scoring -1", [](Problem& p) { p.args.scoring = tilemoe_scoring(-1); }, {"scoring is -1"}},
       {"scoring 5", [](Problem& p) { p.args.scoring = tilemoe_scoring(5); }, {"scoring is 5"}},
       {"logits_dtype int32",
        [](Problem& p) { p.args.logits_dtype = TILEMOE_INT32; },
        {"logits_dtype is int32"}},
       {"logits_dtype 9",
        [](Problem& p) { p.args.logits_dtype = tilemoe_dtype(9); },
        {"logits_dtype is unknown"}},
       {"logits of another dtype",
        [](Problem& p) { p.args.logits_dtype = TILEMOE_BFLOAT16; },
        {"logits", "bfloat16"}},
       {"a weight of X's width alone",
        [](Problem& p) { p.args.X.shape[1] = 16; },
        {"router_weight", "(5, 16)"}},
       {"d 20", [](Problem& p) { p.args.X.shape[1] = 20; }, {"d is 20", "multiple of 8"}},
       {"d 0", [](Problem& p) { p.args.X.shape[1] = 0; }, {"d is 0", "multiple of 8"}},
       {"X of 16 bits, the weight of other 16 bits",
        [](Problem& p) {
          p.args.X.dtype = TILEMOE_BFLOAT16;
          p.args.router_weight.dtype = TILEMOE_FLOAT16;
        },
        {"router_weight", "bfloat16 or float32"}},
       {"n_group 2 of 5", [](Problem& p) { p.args.n_group = 2; }, {"n_group is 2", "E = 5"}},
       {"topk_group without groups",
        [](Problem& p) { p.args.topk_group = 2; },
        {"topk_group is 2", "one group"}},
       {"K past the groups",
        [](Problem& p) { p.args.n_group = 5, p.args.topk_group = 2; },
        {"K is 3", "at most 2"}},
       {"factor NaN",
        [](Problem& p) { p.args.routed_scaling_factor = NAN; },
        {"routed_scaling_factor is nan"}},
       {"logits over X",
        [](Problem& p) { p.args.logits.data = p.args.X.data; },
        {"logits", "X", "memory"}},
       {"counts in the workspace",
        [](Problem& p) { p.args.expert_counts.data = p.args.workspace; },
        {"expert_counts", "workspace", "memory"}}});
  append_X(cases);
  append_tensor(cases, "router_bias", &tilemoe_route_tokens_args::router_bias, true);
  append_tensor(cases, "logits", &tilemoe_route_tokens_args::logits, true);
  append_tensor(cases, "expert_counts", &tilemoe_route_tokens_args::expert_counts, true);
  append(cases,
         tensor_cases(Argument<Problem>{
             "router_weight", [](Problem& p) -> tilemoe_tensor& { return p.args.router_weight; },
             Layout::kRows, false, true}));
  append_workspace(cases);
  return cases;
}

TEST(RoutingArguments, RouteTokens) {
  using Problem = RouteTokens<TILEMOE_SOFTMAX_OVER_CHOSEN>;
  auto cases = token_cases<Problem>();
  cases.push_back({"selection bias without a sigmoid",
                   [](Problem& p) { p.args.selection_bias = p.args.router_bias; },
                   {"selection_bias", "(5)"}});
  run_cases(cases);
}

TEST(RoutingArguments, RouteTokensWithSelectionBias) {
  auto cases = token_cases<RouteTokens<TILEMOE_SIGMOID>>();
  append_tensor(cases, "selection_bias", &tilemoe_route_tokens_args::selection_bias, true);
  run_cases(cases);
}

// What one launch does not take is unsupported, which the query of the workspace says already; a
// wrong argument stays one.
TEST(RoutingArguments, RouteTokensIsOfFew) {
  tilemoe_routing_spec spec{};
  spec.struct_size = sizeof spec;
  spec.kind = TILEMOE_ROUTING_TOP_K;
  size_t bytes = 7;
  const auto expect = [&](int64_t T, int64_t E, int64_t K, int64_t d, tilemoe_status status,
                          const char* word) {
    spec.T = T, spec.E = E, spec.K = K;
    bytes = 7;
    EXPECT_EQ(tilemoe_route_tokens_workspace_bytes(&spec, d, &bytes), status) << word;
    EXPECT_NE(std::string(tilemoe_last_error()).find(word), std::string::npos)
        << tilemoe_last_error();
    EXPECT_EQ(bytes == 7, status != TILEMOE_SUCCESS);
  };
  expect(64, 512, 32, 65536, TILEMOE_SUCCESS, "");
  expect(65, 512, 32, 65536, TILEMOE_UNSUPPORTED, "T is 65, route_tokens takes at most 64");
  expect(64, 513, 32, 65536, TILEMOE_UNSUPPORTED, "E is 513");
  expect(64, 512, 33, 65536, TILEMOE_UNSUPPORTED, "K is 33");
  expect(64, 512, 32, 65544, TILEMOE_UNSUPPORTED, "d is 65544");
  expect(64, 512, 32, 12, TILEMOE_INVALID_ARGUMENT, "d is 12");
  expect(64, 512, 32, -8, TILEMOE_INVALID_ARGUMENT, "d is -8");
  spec.kind = TILEMOE_ROUTING_ROUNDED, spec.m = 8;
  expect(64, 512, 32, 64, TILEMOE_INVALID_ARGUMENT, "expected top-K");
  EXPECT_EQ(tilemoe_route_tokens_workspace_bytes(&spec, 64, nullptr), TILEMOE_INVALID_ARGUMENT);
}

struct RouteGeneral : RoutingProblem {
  tilemoe_route_general_args args{};
  tilemoe_routing* routing_pointer = &routing;
  const tilemoe_route_general_args* args_pointer = &args;
  std::unique_ptr<RoutingProblem> other;
  std::vector<uint64_t> grown_args;

  RouteGeneral() : RoutingProblem(TILEMOE_ROUTING_GENERAL) {
    args.struct_size = sizeof args;
    args.tokens = new_tensor(arena, TILEMOE_INT32, {kPairs});
    args.experts = new_tensor(arena, TILEMOE_INT64, {kPairs});
    args.scores = new_tensor(arena, TILEMOE_FLOAT32, {kPairs});
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    return name == "scores" ? is_float(dtype) : is_integer(dtype);
  }
  const char* function() const { return "tilemoe_route_general"; }
  tilemoe_status call() { return tilemoe_route_general(routing_pointer, args_pointer); }
};

TEST(RoutingArguments, RouteGeneral) {
  auto cases = building_cases<RouteGeneral>();
  append_tensor(cases, "tokens", &tilemoe_route_general_args::tokens);
  append_tensor(cases, "experts", &tilemoe_route_general_args::experts);
  append_tensor(cases, "scores", &tilemoe_route_general_args::scores);
  append_workspace(cases);
  run_cases(cases);
}

template <tilemoe_rounding kRounding>
struct RouteRounded : RoutingProblem {
  tilemoe_route_rounded_args args{};
  tilemoe_routing* routing_pointer = &routing;
  const tilemoe_route_rounded_args* args_pointer = &args;
  std::unique_ptr<RoutingProblem> other;
  std::vector<uint64_t> grown_args;

  RouteRounded() : RoutingProblem(TILEMOE_ROUTING_ROUNDED, kRounding) {
    args.struct_size = sizeof args;
    args.logits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    args.expert_counts = new_tensor(arena, TILEMOE_INT32, {kE});
    if (kRounding == TILEMOE_ROUND_STOCHASTIC) {
      args.seed = new_tensor(arena, TILEMOE_INT64, {1});
      args.step = new_tensor(arena, TILEMOE_INT64, {1});
    }
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    if (name == "logits") return is_float(dtype);
    return dtype == (name == "expert_counts" ? TILEMOE_INT32 : TILEMOE_INT64);
  }
  const char* function() const { return "tilemoe_route_rounded"; }
  tilemoe_status call() { return tilemoe_route_rounded(routing_pointer, args_pointer); }
};

template <tilemoe_rounding kRounding>
std::vector<BadCase<RouteRounded<kRounding>>> rounded_cases() {
  auto cases = building_cases<RouteRounded<kRounding>>();
  append_tensor(cases, "logits", &tilemoe_route_rounded_args::logits, false, Layout::kRows);
  append_tensor(cases, "expert_counts", &tilemoe_route_rounded_args::expert_counts, true);
  append_workspace(cases);
  return cases;
}

TEST(RoutingArguments, RouteRounded) {
  using Problem = RouteRounded<TILEMOE_ROUND_NEAREST>;
  auto cases = rounded_cases<TILEMOE_ROUND_NEAREST>();
  for (auto member : {&tilemoe_route_rounded_args::seed, &tilemoe_route_rounded_args::step})
    cases.push_back(
        {"a random state that nearest does not use",
         [member](Problem& p) { p.args.*member = tensor(p.args.logits.data, TILEMOE_INT64, {1}); },
         {member == &tilemoe_route_rounded_args::seed ? "seed" : "step", "stochastic"}});
  run_cases(cases);
}

TEST(RoutingArguments, RouteRoundedAtRandom) {
  auto cases = rounded_cases<TILEMOE_ROUND_STOCHASTIC>();
  append_tensor(cases, "seed", &tilemoe_route_rounded_args::seed);
  append_tensor(cases, "step", &tilemoe_route_rounded_args::step);
  run_cases(cases);
}

struct RouteGrouped : RoutingProblem {
  tilemoe_route_grouped_args args{};
  tilemoe_routing* routing_pointer = &routing;
  const tilemoe_route_grouped_args* args_pointer = &args;
  std::unique_ptr<RoutingProblem> other;
  std::vector<uint64_t> grown_args;

  RouteGrouped() : RoutingProblem(TILEMOE_ROUTING_GROUPED) {
    args.struct_size = sizeof args;
    args.counts = new_tensor(arena, TILEMOE_INT32, {kE});
    args.scores = new_tensor(arena, TILEMOE_FLOAT32, {kRows});
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    return name == "counts" ? is_integer(dtype) : dtype == TILEMOE_FLOAT32;
  }
  const char* function() const { return "tilemoe_route_grouped"; }
  tilemoe_status call() { return tilemoe_route_grouped(routing_pointer, args_pointer); }
};

TEST(RoutingArguments, RouteGrouped) {
  auto cases = building_cases<RouteGrouped>();
  append_tensor(cases, "counts", &tilemoe_route_grouped_args::counts);
  append_tensor(cases, "scores", &tilemoe_route_grouped_args::scores, true);
  run_cases(cases);
}

}  // namespace
}  // namespace tilemoe::arguments
