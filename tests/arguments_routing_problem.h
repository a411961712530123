// What the tests of the routing entries' arguments share.
#pragma once

#include <cstdint>
#include <stdexcept>
#include <string>
#include <vector>

#include "arguments_support.h"

namespace tilemoe::arguments {

constexpr int64_t kT = 7, kE = 5, kK = 3, kPairs = 11, kRows = 13;

inline void require(tilemoe_status status) {
  if (status != TILEMOE_SUCCESS) throw std::runtime_error(tilemoe_last_error());
}

inline bool is_float(tilemoe_dtype dtype) {
  return dtype == TILEMOE_FLOAT32 || dtype == TILEMOE_BFLOAT16 || dtype == TILEMOE_FLOAT16;
}
inline bool is_integer(tilemoe_dtype dtype) {
  return dtype == TILEMOE_INT32 || dtype == TILEMOE_INT64;
}

// What the routing entries share: a routing bound in the arena, and a workspace.
struct RoutingProblem {
  Arena arena;
  tilemoe_routing_spec spec{};
  tilemoe_routing routing{};
  void* workspace = nullptr;
  size_t workspace_bytes = 0;

  explicit RoutingProblem(tilemoe_routing_kind kind,
                          tilemoe_rounding rounding = TILEMOE_ROUND_NEAREST) {
    spec.struct_size = sizeof spec;
    spec.kind = kind, spec.E = kE;
    if (kind != TILEMOE_ROUTING_GROUPED) spec.T = kT;
    if (kind == TILEMOE_ROUTING_TOP_K || kind == TILEMOE_ROUTING_ROUNDED) spec.K = kK;
    if (kind == TILEMOE_ROUTING_GENERAL) spec.pairs = kPairs;
    if (kind == TILEMOE_ROUTING_GROUPED) spec.capacity = kRows;
    if (kind == TILEMOE_ROUTING_ROUNDED) spec.m = 2, spec.rounding = rounding;
    size_t bytes = 0;
    require(tilemoe_routing_bytes(&spec, &bytes));
    routing.struct_size = sizeof routing;
    require(tilemoe_routing_bind(&spec, arena.take(bytes), bytes, &routing));
    require(tilemoe_routing_workspace_bytes(&spec, &workspace_bytes));
    workspace = arena.take(workspace_bytes);
  }
  RoutingProblem(const RoutingProblem&) = delete;
  RoutingProblem& operator=(const RoutingProblem&) = delete;

  bool accepts_ndim(const std::string&, int) const { return false; }
  std::vector<int64_t> host_outputs() const {
    return {routing.spec.capacity, routing.spec.pairs, reinterpret_cast<intptr_t>(routing.offsets)};
  }
};

template <class Problem>
void append(std::vector<BadCase<Problem>>& cases, std::vector<BadCase<Problem>> more) {
  cases.insert(cases.end(), more.begin(), more.end());
}

// One tensor of p.args, by its member.
template <class Problem, class Args>
void append_tensor(std::vector<BadCase<Problem>>& cases, const char* name,
                   tilemoe_tensor Args::*member, bool optional = false,
                   Layout layout = Layout::kContiguous) {
  append(cases, tensor_cases(Argument<Problem>{
                    name, [member](Problem& p) -> tilemoe_tensor& { return p.args.*member; },
                    layout, optional, false}));
}

// The workspace of p.args, where one is needed.
template <class Problem>
void append_workspace(std::vector<BadCase<Problem>>& cases) {
  append(cases, {{"workspace one byte short",
                  [](Problem& p) { p.args.workspace_bytes -= 1; },
                  {"workspace", "bytes"}},
                 {"workspace null", [](Problem& p) { p.args.workspace = nullptr; }, {"workspace"}},
                 {"workspace misaligned",
                  [](Problem& p) { p.args.workspace = static_cast<char*>(p.args.workspace) + 4; },
                  {"workspace", "16 bytes"}}});
}

}  // namespace tilemoe::arguments
