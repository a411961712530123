#include "routing/rules.h"

#include "core/backend.h"
#include "core/check.h"
#include "core/overlap.h"
#include "routing/groups.h"
#include "routing/order.h"
#include "routing/rule_arguments.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

void check_kind(const tilemoe_routing& routing, tilemoe_routing_kind expected) {
  TILEMOE_CHECK(routing.spec.kind == expected, "the routing is of kind "
                                                   << kind_name(routing.spec.kind) << ", expected "
                                                   << kind_name(expected));
}

// Sets one group if all groups would be chosen.
template <class Args>
void check_groups(Args& args, int64_t K, int64_t E) {
  int64_t& n_group = args.n_group;
  int64_t& topk_group = args.topk_group;
  TILEMOE_CHECK(n_group >= 0 && n_group <= kMaxGroups,
                "n_group is " << n_group << ", expected a value in [0, " << kMaxGroups << "]");
  if (n_group <= 1) {
    TILEMOE_CHECK(topk_group == 0 || topk_group == 1,
                  "topk_group is " << topk_group << ", expected 0 or 1 without groups");
    n_group = topk_group = 1;
    return;
  }
  TILEMOE_CHECK(E % n_group == 0, "n_group is " << n_group << ", expected a divisor of E = " << E);
  const int64_t size = E / n_group;
  TILEMOE_CHECK(
      topk_group >= 1 && topk_group <= n_group,
      "topk_group is " << topk_group << ", expected a value in [1, n_group = " << n_group << "]");
  TILEMOE_CHECK(K <= topk_group * size, "K is " << K << ", expected at most " << topk_group * size
                                                << ", the experts of " << topk_group << " groups");
  switch (args.group_score) {
    case TILEMOE_GROUP_MAX: break;
    case TILEMOE_GROUP_TOP2_SUM:
      TILEMOE_CHECK(ranks_by_sigmoid(args.scoring),
                    "group_score is 0 (sum of the two best), which requires a sigmoid scoring; "
                    "use 1 (the best)");
      TILEMOE_CHECK(size >= 2, "n_group is " << n_group << " of E = " << E
                                             << " experts, but a sum of the two best requires "
                                                "groups of at least 2");
      break;
    default:
      TILEMOE_CHECK(false, "group_score is " << static_cast<int>(args.group_score)
                                             << ", expected 0 (sum of the two best) or 1 (best)");
  }
  if (topk_group == n_group) n_group = topk_group = 1;
}

// The rule by which a token chooses K of E experts and gets its scores.
template <class Args>
void check_rule(Args& args, int64_t K, int64_t E) {
  check_groups(args, K, E);
  check_factor(args.routed_scaling_factor);
  if (!ranks_by_sigmoid(args.scoring))
    check_absent("selection_bias", args.selection_bias, "it requires a sigmoid scoring");
  else if (present(args.selection_bias))
    check_vector("selection_bias", args.selection_bias, E, kFloat32);
}

// A token's K experts, their scores, and how often each expert is among them.
template <class Args>
void check_choice(const Args& args, int64_t T, int64_t E, int64_t K) {
  check_matrix("ids", args.ids, T, K, kIntegers);
  check_matrix("scores", args.scores, T, K, kFloat32);
  if (present(args.expert_counts)) check_vector("expert_counts", args.expert_counts, E, kInt32);
}

// A routing to build, and the arguments to build it from.
template <class Args>
struct Building {
  tilemoe_routing routing;
  Args args;
  const Backend& backend;
  MemoryUse memory;

  Building(tilemoe_routing* to, const char* name, const Args* from, tilemoe_routing_kind kind)
      : routing(read_routing(to)),
        args(read_struct(name, from)),
        backend(backend_for(routing.spec.device)) {
    check_kind(routing, kind);
    memory.writes("routing", routing.offsets, routing_bytes(routing.spec));
  }
};

}  // namespace

void top_k(const tilemoe_top_k_args* given) {
  tilemoe_top_k_args args = read_struct("top_k args", given);
  check_scoring(args.scoring);
  check_logits(args.logits, args.device);
  const Backend& backend = backend_for(args.device);
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1], K = args.K;
  TILEMOE_CHECK(K >= 1 && K <= E, "K is " << K << ", expected a value in [1, E = " << E << "]");
  check_rule(args, K, E);
  check_choice(args, T, E, K);
  MemoryUse memory;
  memory.reads("logits", args.logits);
  memory.reads("selection_bias", args.selection_bias);
  memory.writes("ids", args.ids);
  memory.writes("scores", args.scores);
  memory.writes("expert_counts", args.expert_counts);
  memory.check();
  backend.top_k(args);
}

void top_k_scores(const tilemoe_top_k_scores_args* given) {
  tilemoe_top_k_scores_args args = read_struct("top_k_scores args", given);
  check_reserved("top_k_scores args", args.reserved);
  check_scoring(args.scoring);
  check_factor(args.routed_scaling_factor);
  check_logits(args.logits, args.device);
  const Backend& backend = backend_for(args.device);
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1];
  TILEMOE_CHECK(args.ids.ndim == 2, "ids are " << describe(args.ids) << ", expected (T, K)");
  const int64_t K = args.ids.shape[1], limit = limits::max_rows(args.device);
  TILEMOE_CHECK(K >= 1, "K is " << K << ", expected at least 1");
  TILEMOE_CHECK(checked_product(T, K, "T * K") <= limit,
                "T * K is " << T << " * " << K << ", expected at most " << limit);
  check_choice(args, T, E, K);
  MemoryUse memory;
  memory.reads("logits", args.logits);
  memory.reads("ids", args.ids);
  memory.writes("scores", args.scores);
  memory.writes("expert_counts", args.expert_counts);
  memory.check();
  backend.top_k_scores(args);
}

void route_top_k(tilemoe_routing* routing, const tilemoe_route_top_k_args* given) {
  Building build(routing, "route_top_k args", given, TILEMOE_ROUTING_TOP_K);
  const auto& args = build.args;
  const tilemoe_routing_spec& spec = build.routing.spec;
  check_matrix("ids", args.ids, spec.T, spec.K, kIntegers);
  check_matrix("scores", args.scores, spec.T, spec.K, kFloats);
  check_routing_workspace(build.backend, spec, args.workspace, args.workspace_bytes, build.memory);
  build.memory.reads("ids", args.ids);
  build.memory.reads("scores", args.scores);
  build.memory.check();
  build.backend.route_top_k(build.routing, args);
}

namespace {

// The limits of one launch. Past them other calls do the same, so the argument is not wrong.
void check_decode(const tilemoe_routing_spec& spec, int64_t d) {
  TILEMOE_CHECK(spec.kind == TILEMOE_ROUTING_TOP_K,
                "the routing is of kind " << kind_name(spec.kind) << ", expected top-K");
  TILEMOE_CHECK(d >= limits::kWidthMultiple && d % limits::kWidthMultiple == 0,
                "d is " << d << ", expected a multiple of " << limits::kWidthMultiple);
  const auto check_max = [](const char* name, int64_t value, int64_t limit) {
    TILEMOE_CHECK_SUPPORTED(value <= limit, name << " is " << value
                                                 << ", route_tokens takes at most " << limit
                                                 << "; use top_k and route_top_k for more");
  };
  check_max("T", spec.T, TILEMOE_ROUTE_TOKENS_MOST_T);
  check_max("E", spec.E, TILEMOE_ROUTE_TOKENS_MOST_E);
  check_max("K", spec.K, TILEMOE_ROUTE_TOKENS_MOST_K);
  check_max("d", d, TILEMOE_ROUTE_TOKENS_MOST_D);
}

}  // namespace

size_t route_tokens_workspace_bytes(const tilemoe_routing_spec& spec, int64_t d) {
  check_decode(spec, d);
  return backend_for(spec.device).route_tokens_scratch_bytes(spec, d);
}

void route_tokens(tilemoe_routing* routing, const tilemoe_route_tokens_args* given) {
  Building build(routing, "route_tokens args", given, TILEMOE_ROUTING_TOP_K);
  auto& args = build.args;
  const tilemoe_routing_spec& spec = build.routing.spec;
  check_scoring(args.scoring);
  TILEMOE_CHECK(is_float(args.logits_dtype), "logits_dtype is "
                                                 << tilemoe_dtype_name(args.logits_dtype)
                                                 << ", expected float32, bfloat16 or float16");
  TILEMOE_CHECK(args.X.ndim == 2, "X is " << describe(args.X) << ", expected (T, d)");
  const int64_t d = args.X.shape[1];
  check_tensor("X", args.X, {{spec.T, d}, kFloats, Strides::kRows});
  check_decode(spec, d);
  check_tensor("router_weight", args.router_weight,
               {{spec.E, d}, {args.X.dtype, TILEMOE_FLOAT32}, Strides::kRows});
  if (present(args.router_bias)) check_vector("router_bias", args.router_bias, spec.E, kFloats);
  check_rule(args, spec.K, spec.E);
  if (present(args.logits))
    check_matrix("logits", args.logits, spec.T, spec.E, {args.logits_dtype});
  if (present(args.expert_counts))
    check_vector("expert_counts", args.expert_counts, spec.E, kInt32);
  const size_t needed = build.backend.route_tokens_scratch_bytes(spec, d);
  check_workspace(args.workspace, args.workspace_bytes, needed);
  build.memory.reads("X", args.X);
  build.memory.reads("router_weight", args.router_weight);
  build.memory.reads("router_bias", args.router_bias);
  build.memory.reads("selection_bias", args.selection_bias);
  build.memory.writes("logits", args.logits);
  build.memory.writes("expert_counts", args.expert_counts);
  build.memory.writes("workspace", args.workspace, needed);
  build.memory.check();
  build.backend.route_tokens(build.routing, args);
}

void route_general(tilemoe_routing* routing, const tilemoe_route_general_args* given) {
  Building build(routing, "route_general args", given, TILEMOE_ROUTING_GENERAL);
  const auto& args = build.args;
  const tilemoe_routing_spec& spec = build.routing.spec;
  check_vector("tokens", args.tokens, spec.pairs, kIntegers);
  check_vector("experts", args.experts, spec.pairs, kIntegers);
  check_vector("scores", args.scores, spec.pairs, kFloats);
  check_routing_workspace(build.backend, spec, args.workspace, args.workspace_bytes, build.memory);
  build.memory.reads("tokens", args.tokens);
  build.memory.reads("experts", args.experts);
  build.memory.reads("scores", args.scores);
  build.memory.check();
  build.backend.route_general(build.routing, args);
}

void route_rounded(tilemoe_routing* routing, const tilemoe_route_rounded_args* given) {
  Building build(routing, "route_rounded args", given, TILEMOE_ROUTING_ROUNDED);
  const auto& args = build.args;
  const tilemoe_routing_spec& spec = build.routing.spec;
  check_matrix("logits", args.logits, spec.T, spec.E, kFloats, Strides::kRows);
  if (spec.rounding == TILEMOE_ROUND_STOCHASTIC) {
    check_vector("seed", args.seed, 1, kInt64);
    check_vector("step", args.step, 1, kInt64);
  } else {
    check_absent("seed", args.seed, "it requires stochastic rounding");
    check_absent("step", args.step, "it requires stochastic rounding");
  }
  if (present(args.expert_counts))
    check_vector("expert_counts", args.expert_counts, spec.E, kInt32);
  check_routing_workspace(build.backend, spec, args.workspace, args.workspace_bytes, build.memory);
  build.memory.reads("logits", args.logits);
  build.memory.reads("seed", args.seed);
  build.memory.reads("step", args.step);
  build.memory.writes("expert_counts", args.expert_counts);
  build.memory.check();
  build.backend.route_rounded(build.routing, args);
}

void route_grouped(tilemoe_routing* routing, const tilemoe_route_grouped_args* given) {
  Building build(routing, "route_grouped args", given, TILEMOE_ROUTING_GROUPED);
  const auto& args = build.args;
  const tilemoe_routing_spec& spec = build.routing.spec;
  check_vector("counts", args.counts, spec.E, kIntegers);
  if (present(args.scores)) check_vector("scores", args.scores, spec.capacity, kFloat32);
  build.memory.reads("counts", args.counts);
  build.memory.reads("scores", args.scores);
  build.memory.check();
  build.backend.route_grouped(build.routing, args);
}

}  // namespace tilemoe
