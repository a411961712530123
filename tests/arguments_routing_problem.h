// What the tests of the routing entries' arguments share.
#pragma once

#include <memory>

#include "arguments_support.h"

namespace tilemoe::arguments {

// A routing bound in the arena, and a workspace.
struct RoutingProblem : virtual Problem {
  tilemoe_routing_spec spec{};
  tilemoe_routing routing{};
  void* workspace = nullptr;
  size_t workspace_bytes = 0;

  explicit RoutingProblem(tilemoe_routing_kind kind, int64_t capacity = kCapacity,
                          tilemoe_rounding rounding = TILEMOE_ROUND_NEAREST) {
    spec.struct_size = sizeof spec;
    spec.kind = kind, spec.E = kE;
    if (kind != TILEMOE_ROUTING_GROUPED) spec.T = kT;
    if (kind == TILEMOE_ROUTING_TOP_K || kind == TILEMOE_ROUTING_ROUNDED) spec.K = kK;
    if (kind == TILEMOE_ROUTING_GENERAL) spec.pairs = kPairs;
    if (kind == TILEMOE_ROUTING_GROUPED) spec.capacity = capacity;
    if (kind == TILEMOE_ROUTING_ROUNDED) spec.m = 2, spec.rounding = rounding;
    size_t bytes = 0;
    require(tilemoe_routing_bytes(&spec, &bytes));
    routing.struct_size = sizeof routing;
    require(tilemoe_routing_bind(&spec, arena.take(bytes), bytes, &routing));
    require(tilemoe_routing_workspace_bytes(&spec, &workspace_bytes));
    workspace = arena.take(workspace_bytes);
  }

  // A valid args struct of a call that builds this routing by top-K, its pairs dealt to `experts`.
  tilemoe_route_top_k_args top_k_args(int64_t experts) {
    tilemoe_route_top_k_args args{};
    args.struct_size = sizeof args;
    args.ids = integers({kT, kK});
    for (int64_t pair = 0; pair < kT * kK; ++pair)
      static_cast<int32_t*>(args.ids.data)[pair] = static_cast<int32_t>(pair % experts);
    args.scores = floats({kT, kK});
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
    return args;
  }
  // As if it had never been bound.
  void unbind() {
    const tilemoe_routing_spec bound = routing.spec;
    routing = {};
    routing.struct_size = sizeof routing, routing.spec = bound;
  }

  std::vector<int64_t> host_outputs() const {
    return {routing.spec.capacity, routing.spec.pairs, reinterpret_cast<intptr_t>(routing.offsets)};
  }
};

}  // namespace tilemoe::arguments
