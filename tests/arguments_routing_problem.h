// Valid calls of the entries that choose, route, size, sum and dequantise, for the argument tests
// to change.
#pragma once

#include <memory>

#include "arguments_support.h"

namespace tilemoe::arguments {

// A routing bound in the arena, and a workspace.
struct RoutingProblem : virtual Problem {
  tilemoe_routing_spec spec{};
  tilemoe_routing routing{};
  void *memory = nullptr, *workspace = nullptr;
  size_t memory_bytes = 0, workspace_bytes = 0;

  explicit RoutingProblem(tilemoe_routing_kind kind, int64_t capacity = kCapacity,
                          tilemoe_rounding rounding = TILEMOE_ROUND_NEAREST) {
    spec.struct_size = sizeof spec;
    spec.kind = kind, spec.E = kE;
    if (kind != TILEMOE_ROUTING_GROUPED) spec.T = kT;
    if (kind == TILEMOE_ROUTING_TOP_K || kind == TILEMOE_ROUTING_ROUNDED) spec.K = kK;
    if (kind == TILEMOE_ROUTING_GENERAL) spec.pairs = kPairs;
    if (kind == TILEMOE_ROUTING_GROUPED) spec.capacity = capacity;
    if (kind == TILEMOE_ROUTING_ROUNDED) spec.m = 2, spec.rounding = rounding;
    require(tilemoe_routing_bytes(&spec, &memory_bytes));
    memory = arena.take(memory_bytes);
    routing.struct_size = sizeof routing;
    require(tilemoe_routing_bind(&spec, memory, memory_bytes, &routing));
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

// An entry with one args struct.
template <class Args, tilemoe_status (*kEntry)(const Args*)>
struct Entry : virtual Problem {
  Entry() { args.struct_size = sizeof args; }
  tilemoe_status call() { return kEntry(args_pointer); }

  Args args{};
  const Args* args_pointer = &args;
};

// Equal logits, and room for each token's experts and their scores.
template <class Args, tilemoe_status (*kEntry)(const Args*)>
struct Choice : Entry<Args, kEntry> {
  Choice() {
    this->args.logits = this->floats({kT, kE});
    this->args.ids = this->integers({kT, kK});
    this->args.scores = this->floats({kT, kK});
    this->args.expert_counts = this->integers({kE});
  }
};

template <tilemoe_scoring kScoring>
struct TopK : Choice<tilemoe_top_k_args, tilemoe_top_k> {
  TopK() {
    args.scoring = kScoring, args.K = kK;
    if (kScoring == TILEMOE_SIGMOID) args.selection_bias = floats({kE});
  }
  const char* function() const { return "tilemoe_top_k"; }
};

struct TopKScores : Choice<tilemoe_top_k_scores_args, tilemoe_top_k_scores> {
  const char* function() const { return "tilemoe_top_k_scores"; }
};

struct Logits : Entry<tilemoe_router_logits_args, tilemoe_router_logits> {
  Logits() {
    args.X = floats({kT, kD});
    args.weight = floats({kE, kD});
    args.bias = floats({kE});
    args.logits = floats({kT, kE});
    require(tilemoe_router_logits_workspace_bytes(TILEMOE_CPU, kT, kE, kD, TILEMOE_FLOAT32,
                                                  &args.workspace_bytes));
    args.workspace = arena.take(args.workspace_bytes);
  }
  const char* function() const { return "tilemoe_router_logits"; }
};

struct Losses : Entry<tilemoe_router_losses_args, tilemoe_router_losses> {
  Losses() {
    args.logits = floats({kT, kE});
    args.expert_counts = integers({kE});
    args.losses = floats({2});
    args.dlogits = floats({kT, kE});
    args.balance_coefficient = 0.5f, args.z_coefficient = 0.25f;
    require(tilemoe_router_losses_workspace_bytes(TILEMOE_CPU, kT, kE, &args.workspace_bytes));
    args.workspace = arena.take(args.workspace_bytes);
  }
  const char* function() const { return "tilemoe_router_losses"; }
};

// A top-K or a rounded routing of equal logits, built, and the gradient of its scores.
template <tilemoe_routing_kind kKind, tilemoe_scoring kScoring>
struct RouterBackward : RoutingProblem,
                        Entry<tilemoe_router_backward_args, tilemoe_router_backward> {
  RouterBackward() : RoutingProblem(kKind) {
    args.logits = floats({kT, kE});
    if (kKind == TILEMOE_ROUTING_ROUNDED) {
      tilemoe_route_rounded_args route{};
      route.struct_size = sizeof route;
      route.logits = args.logits;
      route.workspace = workspace, route.workspace_bytes = workspace_bytes;
      require(tilemoe_route_rounded(&routing, &route));
    } else {
      const tilemoe_route_top_k_args route = top_k_args(kK);
      require(tilemoe_route_top_k(&routing, &route));
    }
    args.scoring = kScoring, args.routing = &routing;
    args.ds = floats({routing.spec.pairs});
    args.dlogits = floats({kT, kE});
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  const char* function() const { return "tilemoe_router_backward"; }
};

// An entry that builds a routing.
template <class Args, tilemoe_status (*kEntry)(tilemoe_routing*, const Args*)>
struct Building : RoutingProblem {
  explicit Building(tilemoe_routing_kind kind, tilemoe_rounding rounding = TILEMOE_ROUND_NEAREST)
      : RoutingProblem(kind, kCapacity, rounding) {
    args.struct_size = sizeof args;
  }
  tilemoe_status call() { return kEntry(routing_pointer, args_pointer); }

  // The args struct of a newer version: 8 bytes more, the last of which is not zero.
  void grow_args() {
    grown_args.resize(sizeof args / sizeof(uint64_t) + 1);
    std::memcpy(grown_args.data(), &args, sizeof args);
    grown_args.front() = sizeof args + sizeof(uint64_t);
    reinterpret_cast<unsigned char*>(&grown_args.back())[7] = 1;
    args_pointer = reinterpret_cast<const Args*>(grown_args.data());
  }
  void take_another_kind() {
    const bool grouped = spec.kind == TILEMOE_ROUTING_GROUPED;
    other = std::make_unique<RoutingProblem>(grouped ? TILEMOE_ROUTING_GENERAL
                                                     : TILEMOE_ROUTING_GROUPED);
    routing = other->routing;
  }

  Args args{};
  static_assert(sizeof args % sizeof(uint64_t) == 0);
  tilemoe_routing* routing_pointer = &routing;
  const Args* args_pointer = &args;
  std::unique_ptr<RoutingProblem> other;
  std::vector<uint64_t> grown_args;
};

struct RouteTopK : Building<tilemoe_route_top_k_args, tilemoe_route_top_k> {
  RouteTopK() : Building(TILEMOE_ROUTING_TOP_K) { args = top_k_args(kK); }
  const char* function() const { return "tilemoe_route_top_k"; }
};

template <tilemoe_scoring kScoring>
struct RouteTokens : Building<tilemoe_route_tokens_args, tilemoe_route_tokens> {
  RouteTokens() : Building(TILEMOE_ROUTING_TOP_K) {
    args.scoring = kScoring;
    args.X = floats({kT, kD});
    args.router_weight = floats({kE, kD});
    args.router_bias = floats({kE});
    if (kScoring == TILEMOE_SIGMOID) args.selection_bias = floats({kE});
    args.logits = floats({kT, kE});
    args.expert_counts = integers({kE});
    require(tilemoe_route_tokens_workspace_bytes(&spec, kD, &args.workspace_bytes));
    args.workspace = arena.take(args.workspace_bytes);
  }
  const char* function() const { return "tilemoe_route_tokens"; }
};

struct RouteGeneral : Building<tilemoe_route_general_args, tilemoe_route_general> {
  RouteGeneral() : Building(TILEMOE_ROUTING_GENERAL) {
    args.tokens = integers({kPairs});
    args.experts = integers({kPairs}, TILEMOE_INT64);
    args.scores = floats({kPairs});
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  const char* function() const { return "tilemoe_route_general"; }
};

template <tilemoe_rounding kRounding>
struct RouteRounded : Building<tilemoe_route_rounded_args, tilemoe_route_rounded> {
  RouteRounded() : Building(TILEMOE_ROUTING_ROUNDED, kRounding) {
    args.logits = floats({kT, kE});
    args.expert_counts = integers({kE});
    if (kRounding == TILEMOE_ROUND_STOCHASTIC) use_random_state();
    args.workspace = workspace, args.workspace_bytes = workspace_bytes;
  }
  const char* function() const { return "tilemoe_route_rounded"; }
  void use_random_state() {
    args.seed = integers({1}, TILEMOE_INT64);
    args.step = integers({1}, TILEMOE_INT64);
  }
};

struct RouteGrouped : Building<tilemoe_route_grouped_args, tilemoe_route_grouped> {
  RouteGrouped() : Building(TILEMOE_ROUTING_GROUPED) {
    args.counts = integers({kE});
    args.scores = floats({kCapacity});
  }
  const char* function() const { return "tilemoe_route_grouped"; }
};

constexpr int64_t kOutRows = 5, kPlaces = 3, kSourceRows = 4;
constexpr int32_t kSources = 3;

struct SumRows : Entry<tilemoe_sum_rows_args, tilemoe_sum_rows> {
  SumRows() {
    args.sources = kSources, args.source = sources;
    args.source_rows = kSourceRows;
    for (int32_t s = 0; s < kSources; ++s) sources[s] = floats({kSourceRows, kD}).data;
    args.place = integers({kOutRows, kPlaces});
    args.addend = floats({kOutRows, kD});
    args.out = floats({kOutRows, kD});
  }
  const char* function() const { return "tilemoe_sum_rows"; }
  tilemoe_tensor source(int32_t s) const {
    return tensor(const_cast<void*>(sources[s]), TILEMOE_FLOAT32, {kSourceRows, kD});
  }
  const float* source_row(int32_t s, int64_t row) const {
    return static_cast<const float*>(sources[s]) + row * kD;
  }
  void set_d(int64_t d) { args.out.shape[1] = args.addend.shape[1] = d; }
  void set_P(int64_t P) { args.place = tensor(args.place.data, TILEMOE_INT32, {kOutRows, P}); }
  void set_rows(int64_t rows) {
    for (tilemoe_tensor* t : {&args.place, &args.addend, &args.out}) t->shape[0] = rows;
  }

  const void* sources[TILEMOE_MAX_SOURCES + 1] = {};
};

// Every size of one routing and layer; a failed call leaves the numbers as they were.
struct Sizes : Problem {
  tilemoe_routing_spec spec{};
  tilemoe_experts experts{};
  tilemoe_routing routing{};
  int64_t capacity = -77;
  size_t bytes = 77;
  tilemoe_saved_size saved{sizeof(tilemoe_saved_size), 77, 77, 77, 77, 77, 77, 77};
  tilemoe_workspace_query query{};

  Sizes() {
    spec.struct_size = sizeof spec;
    spec.kind = TILEMOE_ROUTING_ROUNDED;
    spec.T = kT, spec.E = kE, spec.K = kK, spec.m = 4;
    experts.struct_size = sizeof experts;
    experts.d = 24, experts.n = 16, experts.E = kE;
    routing.struct_size = sizeof routing;
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec, query.pass = TILEMOE_PASS_FORWARD;
  }
  tilemoe_status workspace() { return tilemoe_workspace_bytes(&query, &bytes); }
  std::vector<int64_t> host_outputs() const {
    return {capacity, static_cast<int64_t>(bytes), static_cast<int64_t>(saved.rows),
            static_cast<int64_t>(saved.total), reinterpret_cast<intptr_t>(routing.offsets)};
  }
};

template <int kCall>
struct SizesOf : Sizes {
  static constexpr const char* kNames[] = {
      "tilemoe_routing_capacity", "tilemoe_routing_bytes", "tilemoe_routing_workspace_bytes",
      "tilemoe_routing_bind",     "tilemoe_saved_bytes",   "tilemoe_workspace_bytes"};
  const tilemoe_routing_spec* spec_pointer = &spec;
  const tilemoe_experts* experts_pointer = &experts;
  tilemoe_routing* routing_pointer = &routing;
  tilemoe_saved_size* saved_pointer = &saved;
  tilemoe_workspace_query* query_pointer = &query;
  const char* function() const { return kNames[kCall]; }
  tilemoe_status call() {
    switch (kCall) {
      case 0: return tilemoe_routing_capacity(spec_pointer, &capacity);
      case 1: return tilemoe_routing_bytes(spec_pointer, &bytes);
      case 2: return tilemoe_routing_workspace_bytes(spec_pointer, &bytes);
      case 3: return tilemoe_routing_bind(spec_pointer, arena.take(4096), 4096, routing_pointer);
      case 4: return tilemoe_saved_bytes(experts_pointer, spec_pointer, saved_pointer);
      default:
        query_pointer->experts = experts_pointer, query_pointer->routing = spec_pointer;
        return tilemoe_workspace_bytes(query_pointer, &bytes);
    }
  }
};

// The arrays of a weight in the problem's arena, zeros.
inline tilemoe_quantized new_weight(Problem& p, tilemoe_format format, int64_t count,
                                    int64_t experts) {
  const auto bytes = [&](int64_t size) { return p.integers({(size + 3) / 4}).data; };
  const auto floats = [&](int64_t size) { return static_cast<float*>(bytes(4 * size)); };
  tilemoe_quantized weight{};
  weight.format = format;
  weight.codes = bytes(format == TILEMOE_FORMAT_FP8 ? count : count / 2);
  weight.scales = bytes(format == TILEMOE_FORMAT_NVFP4        ? count / 16
                        : format == TILEMOE_FORMAT_NF4_DOUBLE ? count / 64
                                                              : 4 * count / 64);
  if (format == TILEMOE_FORMAT_NF4_DOUBLE) {
    weight.scale_map = floats(256), weight.scale_offset = floats(1);
    weight.scale_of_scales = floats((count / 64 + 255) / 256);
  }
  if (format == TILEMOE_FORMAT_NVFP4) weight.scale_of_scales = floats(experts);
  return weight;
}

struct Dequantizing : Entry<tilemoe_dequantize_args, tilemoe_dequantize> {
  Dequantizing() {
    args.weight = new_weight(*this, TILEMOE_FORMAT_NF4_DOUBLE, kE * kN * kD, kE);
    args.out = floats({kE, kN, kD});
  }
  const char* function() const { return "tilemoe_dequantize"; }
};

}  // namespace tilemoe::arguments
