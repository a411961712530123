// The calls between logits and routing, those that build a routing, the losses, and sums of rows:
// each argument wrong in every way.
#include <cmath>

#include "arguments_routing_problem.h"

namespace tilemoe::arguments {
namespace {

// ------------------------------------------------- experts from logits

template <class P>
Cases<P> entry_cases() {
  return {BAD(p.args_pointer = nullptr, "args is null"),
          BAD(p.args.struct_size = 8, "struct_size is 8"),
          BAD(p.args.struct_size = 0, "struct_size is 0"),
          BAD(p.args.struct_size -= 1, "struct_size")};
}
template <class P>
Cases<P> device_cases() {
  auto cases = entry_cases<P>();
  BAD_VALUES(cases, "device", p.args.device = tilemoe_device(v), 2, 3);
  cases.push_back(UNSUPPORTED(p.args.device = TILEMOE_CUDA, "CUDA"));
  return cases;
}
// Rows of what top_k and route_tokens have in common.
template <class P>
Cases<P> scoring_cases() {
  Cases<P> cases = {
    BAD(p.args.n_group = 2, "n_group is 2", "E = 5"),
    BAD(p.args.topk_group = 2, "topk_group is 2", "without groups"),
    BAD(p.args.n_group = 5; p.args.topk_group = 2, "K is 3", "at most 2"),
    BAD(p.args.routed_scaling_factor = NAN, "routed_scaling_factor is nan"),
    BAD(p.args.routed_scaling_factor = -INFINITY, "routed_scaling_factor is -inf"),
  };
  BAD_VALUES(cases, "scoring", p.args.scoring = tilemoe_scoring(v), -1, 5);
  return cases;
}

template <tilemoe_scoring kScoring>
Cases<TopK<kScoring>> top_k_cases() {
  using P = TopK<kScoring>;
  auto cases = device_cases<P>();
  append(cases, scoring_cases<P>());
  const char* const two = kScoring == TILEMOE_SIGMOID ? "at least 2" : "group_score is 0";
  append<P>(cases, {
    BAD(p.args.K = kE + 1, "K is 6", "5"), BAD(p.args.K = 2, "ids", "(7, 3)", "(7, 2)"),
        BAD(p.args.n_group = -1, "n_group is -1", "32"),
        BAD(p.args.n_group = 33, "n_group is 33", "32"),
        BAD(p.args.n_group = 5, "topk_group is 0", "5"),
        BAD(p.args.n_group = 5; p.args.topk_group = 6, "topk_group is 6", "n_group = 5"),
        BAD(p.args.n_group = 5; p.args.topk_group = 4;
            p.args.group_score = tilemoe_group_score(2), "group_score is 2"),
        BAD(p.args.n_group = 5; p.args.topk_group = 4, two)
  });
  BAD_VALUES(cases, "K", p.args.K = v, 0, -3, INT64_MAX);
  BAD_TENSOR(cases, args.logits, .layout = Layout::kRows, .accepted = kFloats, .free = {"shape["});
  BAD_TENSOR(cases, args.ids, .accepted = kIntegers);
  BAD_TENSOR(cases, args.scores);
  BAD_TENSOR(cases, args.expert_counts, .optional = true);
  return cases;
}

TEST(RouterArguments, TopK) {
  auto cases = top_k_cases<TILEMOE_SOFTMAX_OVER_CHOSEN>();
  cases.push_back(BAD(p.args.selection_bias = p.args.expert_counts, "selection_bias", "(5)"));
  run_cases(cases);
}

TEST(RouterArguments, TopKWithSelectionBias) {
  auto cases = top_k_cases<TILEMOE_SIGMOID>();
  BAD_TENSOR(cases, args.selection_bias, .optional = true);
  run_cases(cases);
}

TEST(RouterArguments, TopKScores) {
  auto cases = device_cases<TopKScores>();
  append<TopKScores>(cases,
                     {BAD(p.args.scoring = tilemoe_scoring(5), "scoring is 5"),
                      BAD(p.args.reserved = 1, "reserved is 1"),
                      BAD(p.args.routed_scaling_factor = NAN, "routed_scaling_factor is nan"),
                      BAD(p.args.ids.shape[1] = p.args.scores.shape[1] = 0, "K is 0")});
  BAD_TENSOR(cases, args.logits, .layout = Layout::kRows, .accepted = kFloats, .free = {"shape["});
  BAD_TENSOR(cases, args.scores);
  BAD_TENSOR(cases, args.expert_counts, .optional = true);
  run_cases(cases);
}

TEST(RouterArguments, Logits) {
  auto cases = device_cases<Logits>();
  append<Logits>(cases, {
    BAD(p.args.reserved = 1, "reserved is 1"), BAD(p.args.X.shape[1] = 16, "weight", "(5, 16)"),
        BAD(p.args.X.shape[1] = p.args.weight.shape[1] = 20, "d is 20", "multiple of 8"),
        BAD(p.args.X.shape[1] = p.args.weight.shape[1] = 0, "d is 0", "multiple of 8"),
        BAD(p.args.X.dtype = TILEMOE_BFLOAT16;
            p.args.weight.dtype = TILEMOE_FLOAT16, "weight", "bfloat16 or float32"),
        BAD(p.args.logits.data = p.args.X.data, "logits", "X", "memory"),
        BAD(p.args.logits.data = p.args.workspace, "logits", "workspace", "memory")
  });
  // Its sizes are the call's own, so a wrong one may show at another tensor.
  BAD_TENSOR(cases, args.X, .layout = Layout::kRows, .aligned = true, .accepted = kFloats,
             .free = {"shape["});
  BAD_TENSOR(cases, args.weight, .layout = Layout::kRows, .aligned = true, .free = {"shape["});
  BAD_TENSOR(cases, args.bias, .optional = true, .accepted = kFloats);
  BAD_TENSOR(cases, args.logits, .layout = Layout::kRows, .accepted = kFloats);
  append_workspace(cases);
  run_cases(cases);
}

TEST(RouterArguments, Losses) {
  auto cases = device_cases<Losses>();
  cases.push_back(BAD(p.args.balance_coefficient = NAN, "balance_coefficient"));
  cases.push_back(BAD(p.args.z_coefficient = INFINITY, "z_coefficient", "inf"));
  BAD_TENSOR(cases, args.logits, .layout = Layout::kRows, .accepted = kFloats, .free = {"shape["});
  BAD_TENSOR(cases, args.expert_counts);
  BAD_TENSOR(cases, args.losses, .optional = true);
  BAD_TENSOR(cases, args.dlogits, .layout = Layout::kRows, .optional = true);
  append_workspace(cases);
  run_cases(cases);
}

template <class P>
Cases<P> router_backward_cases(bool optional_logits) {
  auto cases = entry_cases<P>();
  append<P>(cases, {BAD(p.args.routing = nullptr, "routing is null"),
                    BAD(p.routing.offsets = nullptr, "bind"),
                    BAD(p.routing.spec.capacity += 64, "routing"),
                    BAD(p.args.scoring = tilemoe_scoring(7), "scoring is 7"),
                    UNSUPPORTED(p.routing.spec.device = TILEMOE_CUDA, "CUDA")});
  BAD_VALUES(cases, "accumulate", p.args.accumulate = int32_t(v), -1, 2);
  BAD_TENSOR(cases, args.ds);
  BAD_TENSOR(cases, args.dlogits, .layout = Layout::kRows);
  BAD_TENSOR(cases, args.logits, .layout = Layout::kRows, .optional = optional_logits,
             .accepted = kFloats);
  append_workspace(cases);
  return cases;
}

TEST(RouterArguments, BackwardOverChosen) {
  using P = RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_CHOSEN>;
  run_cases(router_backward_cases<P>(true));
  P without;
  without.args.logits = {};
  expect_taken(without);
}

TEST(RouterArguments, BackwardOverAll) {
  using P = RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_ALL>;
  run_cases(router_backward_cases<P>(false));
}

TEST(RouterArguments, BackwardOfRounding) {
  using P = RouterBackward<TILEMOE_ROUTING_ROUNDED, TILEMOE_SOFTMAX_RENORMALIZED>;
  auto cases = router_backward_cases<P>(false);
  cases.push_back(BAD(p.args.scoring = TILEMOE_SIGMOID, "scoring is 3", "2"));
  run_cases(cases);
}

TEST(RouterArguments, BackwardOfOtherKinds) {
  for (auto kind : {TILEMOE_ROUTING_GENERAL, TILEMOE_ROUTING_GROUPED}) {
    RouterBackward<TILEMOE_ROUTING_TOP_K, TILEMOE_SOFTMAX_OVER_CHOSEN> problem;
    RoutingProblem other(kind);
    problem.args.routing = &other.routing;
    expect_refused(problem.call(), "kind");
  }
}

// ------------------------------------------------- routings

template <class P>
Cases<P> building_cases() {
  return {BAD(p.args_pointer = nullptr, "args is null"),
          BAD(p.args.struct_size = 8, "args.struct_size is 8", "sizeof"),
          BAD(p.grow_args(), "args.struct_size is " + std::to_string(sizeof(P::args) + 8),
              "newer version"),
          BAD(p.routing_pointer = nullptr, "routing is null"),
          BAD(p.routing = {}, "routing.struct_size is 0"),
          BAD(p.unbind(), "routing", "bind"),
          BAD(p.take_another_kind(), "kind"),
          BAD(p.routing.spec.capacity += 64, "routing"),
          BAD(p.routing.spec.E += 64, "routing"),
          UNSUPPORTED(p.routing.spec.device = TILEMOE_CUDA, "CUDA"),
          BAD(p.routing.spec.device = tilemoe_device(5), "device is 5")};
}

TEST(RoutingArguments, RouteTopK) {
  auto cases = building_cases<RouteTopK>();
  BAD_TENSOR(cases, args.ids, .accepted = kIntegers);
  BAD_TENSOR(cases, args.scores, .accepted = kFloats);
  append_workspace(cases);
  run_cases(cases);
}

template <class P>
Cases<P> token_cases() {
  auto cases = building_cases<P>();
  append(cases, scoring_cases<P>());
  append<P>(cases, {
    BAD(p.args.logits_dtype = TILEMOE_INT32, "logits_dtype is int32"),
        BAD(p.args.logits_dtype = tilemoe_dtype(9), "logits_dtype is unknown"),
        BAD(p.args.logits_dtype = TILEMOE_BFLOAT16, "logits", "bfloat16"),
        BAD(p.args.X.shape[1] = 16, "router_weight", "(5, 16)"),
        BAD(p.args.X.dtype = TILEMOE_BFLOAT16;
            p.args.router_weight.dtype = TILEMOE_FLOAT16, "router_weight", "bfloat16 or float32"),
        BAD(p.args.logits.data = p.args.X.data, "logits", "X", "memory"),
        BAD(p.args.expert_counts.data = p.args.workspace, "expert_counts", "workspace", "memory"),
        BAD(p.args.X.shape[1] = 20, "d is 20", "multiple of 8"),
        BAD(p.args.X.shape[1] = 0, "d is 0", "multiple of 8")
  });
  // Its width is X's own, so a wrong one may show at another tensor.
  BAD_TENSOR(cases, args.X, .layout = Layout::kRows, .aligned = true, .accepted = kFloats,
             .free = {"shape[1]"});
  BAD_TENSOR(cases, args.router_bias, .optional = true, .accepted = kFloats);
  BAD_TENSOR(cases, args.logits, .optional = true);
  BAD_TENSOR(cases, args.expert_counts, .optional = true);
  BAD_TENSOR(cases, args.router_weight, .layout = Layout::kRows, .aligned = true);
  append_workspace(cases);
  return cases;
}

TEST(RoutingArguments, RouteTokens) {
  auto cases = token_cases<RouteTokens<TILEMOE_SOFTMAX_OVER_CHOSEN>>();
  cases.push_back(BAD(p.args.selection_bias = p.args.router_bias, "selection_bias", "(5)"));
  run_cases(cases);
}

TEST(RoutingArguments, RouteTokensWithSelectionBias) {
  auto cases = token_cases<RouteTokens<TILEMOE_SIGMOID>>();
  BAD_TENSOR(cases, args.selection_bias, .optional = true);
  run_cases(cases);
}

// Sizes above the limits of one launch are unsupported, in the workspace query too; a wrong
// argument stays an invalid argument.
TEST(RoutingArguments, RouteTokensHasLimits) {
  tilemoe_routing_spec spec{};
  spec.struct_size = sizeof spec;
  spec.kind = TILEMOE_ROUTING_TOP_K;
  const auto expect = [&](int64_t T, int64_t E, int64_t K, int64_t d, tilemoe_status status,
                          const char* word) {
    spec.T = T, spec.E = E, spec.K = K;
    size_t bytes = 7;
    expect_refused(tilemoe_route_tokens_workspace_bytes(&spec, d, &bytes), word, status);
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

TEST(RoutingArguments, RouteGeneral) {
  auto cases = building_cases<RouteGeneral>();
  BAD_TENSOR(cases, args.tokens, .accepted = kIntegers);
  BAD_TENSOR(cases, args.experts, .accepted = kIntegers);
  BAD_TENSOR(cases, args.scores, .accepted = kFloats);
  append_workspace(cases);
  run_cases(cases);
}

template <tilemoe_rounding kRounding>
Cases<RouteRounded<kRounding>> rounded_cases() {
  auto cases = building_cases<RouteRounded<kRounding>>();
  BAD_TENSOR(cases, args.logits, .layout = Layout::kRows, .accepted = kFloats);
  BAD_TENSOR(cases, args.expert_counts, .optional = true);
  append_workspace(cases);
  return cases;
}

TEST(RoutingArguments, RouteRounded) {
  auto cases = rounded_cases<TILEMOE_ROUND_NEAREST>();
  cases.push_back(BAD(p.use_random_state(); p.args.step = {}, "seed", "stochastic"));
  cases.push_back(BAD(p.use_random_state(); p.args.seed = {}, "step", "stochastic"));
  run_cases(cases);
}

TEST(RoutingArguments, RouteRoundedAtRandom) {
  auto cases = rounded_cases<TILEMOE_ROUND_STOCHASTIC>();
  BAD_TENSOR(cases, args.seed);
  BAD_TENSOR(cases, args.step);
  run_cases(cases);
}

TEST(RoutingArguments, RouteGrouped) {
  auto cases = building_cases<RouteGrouped>();
  BAD_TENSOR(cases, args.counts, .accepted = kIntegers);
  BAD_TENSOR(cases, args.scores, .optional = true);
  run_cases(cases);
}

// ------------------------------------------------- sums of rows

TEST(SumRowsArguments, EachIsChecked) {
  using P = SumRows;
  auto cases = device_cases<P>();
  append<P>(cases, {BAD(p.args.source = nullptr, "source is null"),
                    BAD(p.sources[1] = nullptr, "source[1]", "(4, 24)", "null"),
                    BAD(p.sources[2] = p.source_row(2, 0) + 2, "source[2]", "16 bytes"),
                    BAD(p.args.source_rows = INT32_MAX / kSources + 1, "source_rows is 715827883",
                        "715827882"),
                    BAD(p.set_d(20), "d is 20", "8"), BAD(p.set_d(0), "d is 0"),
                    BAD(p.set_P(0), "P is 0", "expected a value in [1, 64]"),
                    BAD(p.set_P(65), "P is 65", "expected a value in [1, 64]"),
                    BAD(p.args.out.dtype = TILEMOE_BFLOAT16, "addend", "bfloat16"),
                    BAD(p.args.out.shape[0] = int64_t{1} << 31, "rows is 2147483648"),
                    BAD(p.args.out.data = p.args.place.data, "out", "place", "shares memory"),
                    BAD(p.args.out.data = p.source(1).data, "out", "source[1]", "shares memory"),
                    BAD(p.args.out.data = const_cast<float*>(p.source_row(0, kSourceRows - 1)),
                        "out", "source[0]", "shares memory"),
                    BAD(p.args.addend.data = static_cast<float*>(p.args.out.data) + kD, "out",
                        "addend", "shares memory")});
  BAD_VALUES(cases, "source_rows", p.args.source_rows = v, -1, INT64_MAX);
  for (const int32_t sources : {0, -1, 65})
    cases.push_back({"sources",
                     [sources](P& p) { p.args.sources = sources; },
                     {"sources is " + std::to_string(sources), "expected a value in [1, 64]"}});
  BAD_TENSOR(cases, args.place);
  // (5, 3) of place may also be (5, 2): P is place's own to say
  cases.erase(std::remove_if(cases.begin(), cases.end(),
                             [](const auto& bad) {
                               return bad.name == "place: shape[1] = 2" ||
                                      bad.name == "place: shape[1] = 11";
                             }),
              cases.end());
  BAD_TENSOR(cases, args.addend, .layout = Layout::kRows, .optional = true, .aligned = true);
  // rows and d come from out: a wrong shape may show at another tensor, as another dtype does.
  BAD_TENSOR(cases, args.out, .layout = Layout::kRows, .aligned = true,
             .free = {"shape[", "dtype"});
  run_cases(cases);
}

TEST(SumRowsArguments, WhatIsTaken) {
  {
    SumRows p;  // values are no errors
    for (int64_t i = 0; i < kOutRows * kPlaces; ++i)
      static_cast<int32_t*>(p.args.place.data)[i] = i % 2 == 0 ? INT32_MIN : INT32_MAX;
    expect_taken(p);
  }
  {
    SumRows p;  // no rows
    p.set_rows(0);
    p.args.place.data = p.args.addend.data = p.args.out.data = nullptr;
    expect_taken(p);
  }
  {
    SumRows p;  // sources without rows are nowhere
    p.args.source_rows = 0;
    for (const void*& source : p.sources) source = nullptr;
    expect_taken(p);
  }
  {
    SumRows p;  // one source twice, and the addend among them
    p.sources[1] = p.sources[0];
    p.args.addend = p.source(0);
    p.set_rows(kSourceRows);
    expect_taken(p);
  }
  {
    SumRows p;
    p.args.addend = p.args.out;
    expect_taken(p);
    p.args.addend = {};
    expect_taken(p);
  }
}

}  // namespace
}  // namespace tilemoe::arguments
