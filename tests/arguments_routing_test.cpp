// The calls that build a routing, each argument wrong in every way.
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
