// The calls between logits and routing, the losses, and the sizes of things, each argument wrong in
// every way.
#include <limits>

#include "arguments_routing_problem.h"

namespace tilemoe::arguments {
namespace {

constexpr float kNan = std::numeric_limits<float>::quiet_NaN();

// T and E come from the logits, so a wrong shape of theirs shows at another tensor.
template <class Problem, class Args>
void append_free_logits(std::vector<BadCase<Problem>>& cases, tilemoe_tensor Args::*member) {
  const Argument<Problem> logits{"logits",
                                 [member](Problem& p) -> tilemoe_tensor& { return p.args.*member; },
                                 Layout::kRows, false, false};
  for (auto bad : tensor_cases(logits)) {
    if (bad.name.find("shape[") != std::string::npos) bad.words.clear();
    cases.push_back(bad);
  }
}

// Equal logits, and room for each token's experts and their scores.
template <class Args>
struct Choice {
  Arena arena;
  Args args{};
  const Args* args_pointer = &args;

  Choice() {
    args.struct_size = sizeof args;
    args.logits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    args.ids = new_tensor(arena, TILEMOE_INT32, {kT, kK});
    args.scores = new_tensor(arena, TILEMOE_FLOAT32, {kT, kK});
    args.expert_counts = new_tensor(arena, TILEMOE_INT32, {kE});
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    if (name == "logits") return is_float(dtype);
    if (name == "ids") return is_integer(dtype);
    return dtype == (name == "expert_counts" ? TILEMOE_INT32 : TILEMOE_FLOAT32);
  }
  bool accepts_ndim(const std::string&, int) const { return false; }
  std::vector<int64_t> host_outputs() const { return {}; }
};

template <tilemoe_scoring kScoring>
struct TopK : Choice<tilemoe_top_k_args> {
  TopK() {
    args.scoring = kScoring, args.K = kK;
    if (kScoring == TILEMOE_SIGMOID) args.selection_bias = new_tensor(arena, TILEMOE_FLOAT32, {kE});
  }
  const char* function() const { return "tilemoe_top_k"; }
  tilemoe_status call() { return tilemoe_top_k(args_pointer); }
};

template <class Problem>
constexpr bool kBySigmoid = std::is_same_v<Problem, TopK<TILEMOE_SIGMOID>>;

template <class Problem>
std::vector<BadCase<Problem>> top_k_cases() {
  std::vector<BadCase<Problem>> cases = {
      {"args null", [](Problem& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"args.struct_size", [](Problem& p) { p.args.struct_size = 8; }, {"struct_size is 8"}},
      {"scoring -1", [](Problem& p) { p.args.scoring = tilemoe_scoring(-1); }, {"scoring is -1"}},
      {"scoring 5", [](Problem& p) { p.args.scoring = tilemoe_scoring(5); }, {"scoring is 5"}},
      {"K 0", [](Problem& p) { p.args.K = 0; }, {"K is 0"}},
      {"K -3", [](Problem& p) { p.args.K = -3; }, {"K is -3"}},
      {"K past E", [](Problem& p) { p.args.K = kE + 1; }, {"K is 6", "5"}},
      {"K huge", [](Problem& p) { p.args.K = INT64_MAX; }, {"K is 9223372036854775807"}},
      {"K against ids", [](Problem& p) { p.args.K = 2; }, {"ids", "(7, 3)", "(7, 2)"}},
      {"device 3", [](Problem& p) { p.args.device = tilemoe_device(3); }, {"device is 3"}},
      {"cuda", [](Problem& p) { p.args.device = TILEMOE_CUDA; }, {"CUDA"}, TILEMOE_UNSUPPORTED},
      {"n_group -1", [](Problem& p) { p.args.n_group = -1; }, {"n_group is -1", "32"}},
      {"n_group 33", [](Problem& p) { p.args.n_group = 33; }, {"n_group is 33", "32"}},
      {"n_group 2 of 5", [](Problem& p) { p.args.n_group = 2; }, {"n_group is 2", "E = 5"}},
      {"topk_group without groups",
       [](Problem& p) { p.args.topk_group = 2; },
       {"topk_group is 2", "one group"}},
      {"topk_group 0 of 5", [](Problem& p) { p.args.n_group = 5; }, {"topk_group is 0", "5"}},
      {"topk_group 6 of 5",
       [](Problem& p) { p.args.n_group = 5, p.args.topk_group = 6; },
       {"topk_group is 6", "n_group = 5"}},
      {"K past the groups",
       [](Problem& p) { p.args.n_group = 5, p.args.topk_group = 2; },
       {"K is 3", "at most 2"}},
      {"group_score 2",
       [](Problem& p) {
         p.args.n_group = 5, p.args.topk_group = 4;
         p.args.group_score = tilemoe_group_score(2);
       },
       {"group_score is 2"}},
      {"a sum of two where there are not",
       [](Problem& p) { p.args.n_group = 5, p.args.topk_group = 4; },
       {kBySigmoid<Problem> ? "at least 2" : "group_score is 0"}},
      {"factor NaN",
       [](Problem& p) { p.args.routed_scaling_factor = std::numeric_limits<float>::quiet_NaN(); },
       {"routed_scaling_factor is nan"}},
      {"factor infinite",
       [](Problem& p) { p.args.routed_scaling_factor = -std::numeric_limits<float>::infinity(); },
       {"routed_scaling_factor is -inf"}},
  };
  append_free_logits(cases, &tilemoe_top_k_args::logits);
  append_tensor(cases, "ids", &tilemoe_top_k_args::ids);
  append_tensor(cases, "scores", &tilemoe_top_k_args::scores);
  append_tensor(cases, "expert_counts", &tilemoe_top_k_args::expert_counts, true);
  return cases;
}

TEST(RouterArguments, TopK) {
  using Problem = TopK<TILEMOE_SOFTMAX_OVER_CHOSEN>;
  auto cases = top_k_cases<Problem>();
  cases.push_back({"selection bias without a sigmoid",
                   [](Problem& p) { p.args.selection_bias = p.args.expert_counts; },
                   {"selection_bias", "(5)"}});
  run_cases(cases);
}

TEST(RouterArguments, TopKWithSelectionBias) {
  auto cases = top_k_cases<TopK<TILEMOE_SIGMOID>>();
  append_tensor(cases, "selection_bias", &tilemoe_top_k_args::selection_bias, true);
  run_cases(cases);
}

struct TopKScores : Choice<tilemoe_top_k_scores_args> {
  const char* function() const { return "tilemoe_top_k_scores"; }
  tilemoe_status call() { return tilemoe_top_k_scores(args_pointer); }
};

TEST(RouterArguments, TopKScores) {
  using Problem = TopKScores;
  std::vector<BadCase<Problem>> cases = {
      {"args null", [](Problem& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"args.struct_size", [](Problem& p) { p.args.struct_size = 8; }, {"struct_size is 8"}},
      {"scoring 5", [](Problem& p) { p.args.scoring = tilemoe_scoring(5); }, {"scoring is 5"}},
      {"reserved", [](Problem& p) { p.args.reserved = 1; }, {"reserved is 1"}},
      {"factor NaN",
       [](Problem& p) { p.args.routed_scaling_factor = std::numeric_limits<float>::quiet_NaN(); },
       {"routed_scaling_factor is nan"}},
      {"no ids a token",
       [](Problem& p) { p.args.ids.shape[1] = p.args.scores.shape[1] = 0; },
       {"K is 0"}},
      {"device 3", [](Problem& p) { p.args.device = tilemoe_device(3); }, {"device is 3"}},
      {"cuda", [](Problem& p) { p.args.device = TILEMOE_CUDA; }, {"CUDA"}, TILEMOE_UNSUPPORTED},
  };
  append_free_logits(cases, &tilemoe_top_k_scores_args::logits);
  append_tensor(cases, "scores", &tilemoe_top_k_scores_args::scores);
  append_tensor(cases, "expert_counts", &tilemoe_top_k_scores_args::expert_counts, true);
  run_cases(cases);
}

// A top-K or a rounded routing of equal logits, built, and the gradient of its scores.
template <tilemoe_routing_kind kKind, tilemoe_scoring kScoring>
struct RouterBackward : RoutingProblem {
  tilemoe_router_backward_args args{};
  const tilemoe_router_backward_args* args_pointer = &args;

  RouterBackward() : RoutingProblem(kKind) {
    const tilemoe_tensor logits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    build(logits);
    args.struct_size = sizeof args;
    args.scoring = kScoring, args.routing = &routing;
    args.logits = logits;
    args.ds = new_tensor(arena, TILEMOE_FLOAT32, {routing.spec.pairs});
    args.dlogits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    return name == "logits" ? is_float(dtype) : dtype == TILEMOE_FLOAT32;
  }
  const char* function() const { return "tilemoe_router_backward"; }
  tilemoe_status call() { return tilemoe_router_backward(args_pointer); }

 private:
  void build(const tilemoe_tensor& logits) {
    if (kKind == TILEMOE_ROUTING_ROUNDED) {
      tilemoe_route_rounded_args route{};
      route.struct_size = sizeof route;
      route.logits = logits;
      route.workspace = workspace, route.workspace_bytes = workspace_bytes;
      return require(tilemoe_route_rounded(&routing, &route));
    }
    tilemoe_route_top_k_args route{};
    route.struct_size = sizeof route;
    route.ids = new_tensor(arena, TILEMOE_INT32, {kT, kK});
    for (int64_t pair = 0; pair < kT * kK; ++pair)
      static_cast<int32_t*>(route.ids.data)[pair] = static_cast<int32_t>(pair % kK);
    route.scores = new_tensor(arena, TILEMOE_FLOAT32, {kT, kK});
    route.workspace = workspace, route.workspace_bytes = workspace_bytes;
    require(tilemoe_route_top_k(&routing, &route));
  }
};

template <class Problem>
std::vector<BadCase<Problem>> router_backward_cases() {
  std::vector<BadCase<Problem>> cases = {
      {"args null", [](Problem& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"args.struct_size", [](Problem& p) { p.args.struct_size -= 1; }, {"struct_size"}},
      {"routing null", [](Problem& p) { p.args.routing = nullptr; }, {"routing is null"}},
      {"routing never bound", [](Problem& p) { p.routing.offsets = nullptr; }, {"bind"}},
      {"capacity grown", [](Problem& p) { p.routing.spec.capacity += 64; }, {"routing"}},
      {"scoring 7", [](Problem& p) { p.args.scoring = tilemoe_scoring(7); }, {"scoring is 7"}},
      {"cuda",
       [](Problem& p) { p.routing.spec.device = TILEMOE_CUDA; },
       {"CUDA"},
       TILEMOE_UNSUPPORTED},
  };
  for (int32_t accumulate : {-1, 2})
    cases.push_back({"accumulate " + std::to_string(accumulate),
                     [accumulate](Problem& p) { p.args.accumulate = accumulate; },
                     {"accumulate is"}});
  append_tensor(cases, "ds", &tilemoe_router_backward_args::ds);
  append_tensor(cases, "dlogits", &tilemoe_router_backward_args::dlogits, false, Layout::kRows);
  append_workspace(cases);
  return cases;
}

TEST(RouterArguments, BackwardOverChosen) {
  using Problem = RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_CHOSEN>;
  auto cases = router_backward_cases<Problem>();
  append_tensor(cases, "logits", &tilemoe_router_backward_args::logits, true, Layout::kRows);
  run_cases(cases);
  Problem without;
  without.args.logits = {};
  EXPECT_EQ(without.call(), TILEMOE_SUCCESS) << tilemoe_last_error();
}

TEST(RouterArguments, BackwardOverAll) {
  using Problem = RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_ALL>;
  auto cases = router_backward_cases<Problem>();
  append_tensor(cases, "logits", &tilemoe_router_backward_args::logits, false, Layout::kRows);
  run_cases(cases);
}

TEST(RouterArguments, BackwardOfRounding) {
  using Problem = RouterBackward<TILEMOE_ROUTING_ROUNDED, TILEMOE_SOFTMAX_RENORMALIZED>;
  auto cases = router_backward_cases<Problem>();
  append_tensor(cases, "logits", &tilemoe_router_backward_args::logits, false, Layout::kRows);
  cases.push_back({"another rule than rounding's",
                   [](Problem& p) { p.args.scoring = TILEMOE_SIGMOID; },
                   {"scoring is 3", "2"}});
  run_cases(cases);
}

TEST(RouterArguments, BackwardOfOtherKinds) {
  using Problem = RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_CHOSEN>;
  for (auto kind : {TILEMOE_ROUTING_GENERAL, TILEMOE_ROUTING_GROUPED}) {
    Problem problem;
    RoutingProblem other(kind);
    problem.args.routing = &other.routing;
    EXPECT_EQ(problem.call(), TILEMOE_INVALID_ARGUMENT);
    EXPECT_NE(std::string(tilemoe_last_error()).find("kind"), std::string::npos);
  }
}

struct Losses {
  Arena arena;
  tilemoe_router_losses_args args{};
  const tilemoe_router_losses_args* args_pointer = &args;

  Losses() {
    args.struct_size = sizeof args;
    args.logits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    args.expert_counts = new_tensor(arena, TILEMOE_INT32, {kE});
    args.losses = new_tensor(arena, TILEMOE_FLOAT32, {2});
    args.dlogits = new_tensor(arena, TILEMOE_FLOAT32, {kT, kE});
    args.balance_coefficient = 0.5f, args.z_coefficient = 0.25f;
    require(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, kT, kE, &args.workspace_bytes));
    args.workspace = arena.take(args.workspace_bytes);
  }
  bool accepts(const std::string& name, tilemoe_dtype dtype) const {
    if (name == "logits") return is_float(dtype);
    return dtype == (name == "expert_counts" ? TILEMOE_INT32 : TILEMOE_FLOAT32);
  }
  bool accepts_ndim(const std::string&, int) const { return false; }
  std::vector<int64_t> host_outputs() const { return {}; }
  const char* function() const { return "tilemoe_router_losses"; }
  tilemoe_status call() { return tilemoe_router_losses(args_pointer); }
};

TEST(RouterArguments, Losses) {
  using Problem = Losses;
  using Args = tilemoe_router_losses_args;
  std::vector<BadCase<Problem>> cases = {
      {"args null", [](Problem& p) { p.args_pointer = nullptr; }, {"args is null"}},
      {"args.struct_size", [](Problem& p) { p.args.struct_size = 0; }, {"struct_size is 0"}},
      {"device 2", [](Problem& p) { p.args.device = tilemoe_device(2); }, {"device is 2"}},
      {"cuda", [](Problem& p) { p.args.device = TILEMOE_CUDA; }, {"CUDA"}, TILEMOE_UNSUPPORTED},
      {"balance_coefficient NaN",
       [](Problem& p) { p.args.balance_coefficient = kNan; },
       {"balance_coefficient"}},
      {"z_coefficient infinite",
       [](Problem& p) { p.args.z_coefficient = std::numeric_limits<float>::infinity(); },
       {"z_coefficient", "inf"}},
  };
  append_free_logits(cases, &Args::logits);
  append_tensor(cases, "expert_counts", &Args::expert_counts);
  append_tensor(cases, "losses", &Args::losses, true);
  append_tensor(cases, "dlogits", &Args::dlogits, true, Layout::kRows);
  append_workspace(cases);
  run_cases(cases);
}

}  // namespace
}  // namespace tilemoe::arguments
