// Routing in C++: which tokens each expert gets. The semantics, units and sources are those
// documented at the functions of the same name in tilemoe.h; every call throws tilemoe::Error on a
// bad argument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilemoe/tensor.h"

namespace tilemoe {

enum class Scoring : int {
  kSoftmaxOverChosen = TILEMOE_SOFTMAX_OVER_CHOSEN,
  kSoftmaxOverAll = TILEMOE_SOFTMAX_OVER_ALL,
  kSoftmaxRenormalized = TILEMOE_SOFTMAX_RENORMALIZED,
  kSigmoid = TILEMOE_SIGMOID,
  kSigmoidRenormalized = TILEMOE_SIGMOID_RENORMALIZED,
};

enum class GroupScore : int {
  kTop2Sum = TILEMOE_GROUP_TOP2_SUM,
  kMax = TILEMOE_GROUP_MAX,
};

enum class Rounding : int {
  kNearest = TILEMOE_ROUND_NEAREST,
  kUp = TILEMOE_ROUND_UP,
  kDown = TILEMOE_ROUND_DOWN,
  kStochastic = TILEMOE_ROUND_STOCHASTIC,
  kBalanced = TILEMOE_ROUND_BALANCED,
};

// The size of a routing; host data only.
struct RoutingSpec : tilemoe_routing_spec {
  static RoutingSpec top_k(Device device, int64_t T, int64_t E, int64_t K) {
    RoutingSpec spec(TILEMOE_ROUTING_TOP_K, device);
    spec.T = T, spec.E = E, spec.K = K;
    return spec;
  }
  // `pairs` triples over T tokens.
  static RoutingSpec general(Device device, int64_t T, int64_t E, int64_t pairs) {
    RoutingSpec spec(TILEMOE_ROUTING_GENERAL, device);
    spec.T = T, spec.E = E, spec.pairs = pairs;
    return spec;
  }
  // Rounds each `round_tokens` tokens separately; 0: all T together.
  static RoutingSpec rounded(Device device, int64_t T, int64_t E, int64_t K, Rounding rule,
                             int64_t m = 128, int64_t round_tokens = 0) {
    RoutingSpec spec(TILEMOE_ROUTING_ROUNDED, device);
    spec.T = T, spec.E = E, spec.K = K, spec.m = m, spec.round_tokens = round_tokens;
    spec.rounding = static_cast<tilemoe_rounding>(rule);
    return spec;
  }
  static RoutingSpec grouped(Device device, int64_t rows, int64_t E) {
    RoutingSpec spec(TILEMOE_ROUTING_GROUPED, device);
    spec.E = E, spec.capacity = rows;
    return spec;
  }

  int64_t bound() const {
    int64_t rows = 0;
    check(tilemoe_routing_capacity(this, &rows));
    return rows;
  }
  size_t bytes() const {
    size_t size = 0;
    check(tilemoe_routing_bytes(this, &size));
    return size;
  }
  size_t workspace_bytes() const {
    size_t size = 0;
    check(tilemoe_routing_workspace_bytes(this, &size));
    return size;
  }
  // The workspace of Routing::from_tokens, for tokens of width d.
  size_t route_tokens_workspace_bytes(int64_t d) const {
    size_t size = 0;
    check(tilemoe_route_tokens_workspace_bytes(this, d, &size));
    return size;
  }

 private:
  RoutingSpec(tilemoe_routing_kind routing_kind, Device where) : tilemoe_routing_spec{} {
    struct_size = sizeof(tilemoe_routing_spec);
    device = to_c(where);
    kind = routing_kind;
  }
};

// Token rounding, from logits.
struct RoundedRouting {
  ConstTensor logits;         // (T, E)
  ConstTensor seed = {};      // (1) int64, stochastic rounding only, as step
  ConstTensor step = {};      // (1) int64
  Tensor expert_counts = {};  // out (E) int32, optional
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};

// Routing of a small number of tokens from the tokens themselves and the router's weight.
struct TokenRouting {
  Scoring scoring = Scoring::kSoftmaxOverChosen;
  Required<DType> logits_dtype;     // what logits are rounded to
  ConstTensor X;                    // (T, d)
  ConstTensor router_weight;        // (E, d)
  ConstTensor router_bias = {};     // (E); optional
  ConstTensor selection_bias = {};  // (E) float32, for the sigmoid rules; optional
  Tensor logits = {};               // out (T, E); optional
  Tensor expert_counts = {};        // out (E) int32; optional
  int64_t n_group = 1, topk_group = 1;
  GroupScore group_score = GroupScore::kTop2Sum;
  float routed_scaling_factor = 1;
  void* workspace = nullptr;
  size_t workspace_bytes = 0;  // RoutingSpec::route_tokens_workspace_bytes
  void* stream = nullptr;
};

// The routing of a batch, in the caller's `bytes` bytes at `memory`, which must outlive it.
class Routing : public tilemoe_routing {
 public:
  Routing(const RoutingSpec& size, void* memory, size_t bytes) : tilemoe_routing{} {
    struct_size = sizeof(tilemoe_routing);
    check(tilemoe_routing_bind(&size, memory, bytes, this));
  }

  // ids, scores (T, K)
  void from_top_k(const ConstTensor& ids, const ConstTensor& scores, void* workspace,
                  size_t workspace_bytes, void* stream = nullptr) {
    tilemoe_route_top_k_args args{};
    args.struct_size = sizeof args;
    args.ids = ids, args.scores = scores;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_top_k(this, &args));
  }
  // At most TILEMOE_ROUTE_TOKENS_MOST_T tokens.
  void from_tokens(const TokenRouting& given) {
    tilemoe_route_tokens_args args{};
    args.struct_size = sizeof args;
    args.scoring = static_cast<tilemoe_scoring>(given.scoring);
    args.logits_dtype = to_c(given.logits_dtype);
    args.X = given.X, args.router_weight = given.router_weight;
    args.router_bias = given.router_bias, args.selection_bias = given.selection_bias;
    args.logits = given.logits, args.expert_counts = given.expert_counts;
    args.n_group = given.n_group, args.topk_group = given.topk_group;
    args.group_score = static_cast<tilemoe_group_score>(given.group_score);
    args.routed_scaling_factor = given.routed_scaling_factor;
    args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
    args.stream = given.stream;
    check(tilemoe_route_tokens(this, &args));
  }
  // tokens, experts, scores (pairs)
  void from_triples(const ConstTensor& tokens, const ConstTensor& experts,
                    const ConstTensor& scores, void* workspace, size_t workspace_bytes,
                    void* stream = nullptr) {
    tilemoe_route_general_args args{};
    args.struct_size = sizeof args;
    args.tokens = tokens, args.experts = experts, args.scores = scores;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_general(this, &args));
  }
  void from_logits(const RoundedRouting& given) {
    tilemoe_route_rounded_args args{};
    args.struct_size = sizeof args;
    args.logits = given.logits, args.seed = given.seed, args.step = given.step;
    args.expert_counts = given.expert_counts;
    args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
    args.stream = given.stream;
    check(tilemoe_route_rounded(this, &args));
  }
  // counts (E); scores (rows), optional
  void from_counts(const ConstTensor& counts, const ConstTensor& row_scores = {},
                   void* stream = nullptr) {
    tilemoe_route_grouped_args args{};
    args.struct_size = sizeof args;
    args.counts = counts, args.scores = row_scores, args.stream = stream;
    check(tilemoe_route_grouped(this, &args));
  }

  int64_t pairs() const { return spec.pairs; }
  int64_t capacity() const { return spec.capacity; }
};

inline size_t router_logits_workspace_bytes(Device device, int64_t T, int64_t E, int64_t d,
                                            DType weight_dtype) {
  size_t size = 0;
  check(tilemoe_router_logits_workspace_bytes(to_c(device), T, E, d, to_c(weight_dtype), &size));
  return size;
}

// X (T, d), weight (E, d) -> logits (T, E), in one order of the sum.
struct RouterLogits {
  Required<Device> device;
  ConstTensor X;
  ConstTensor weight;
  ConstTensor bias = {};  // (E); optional
  Tensor logits;          // out
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};
inline void router_logits(const RouterLogits& given) {
  tilemoe_router_logits_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.X = given.X, args.weight = given.weight, args.bias = given.bias;
  args.logits = given.logits;
  args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
  args.stream = given.stream;
  check(tilemoe_router_logits(&args));
}

// logits (T, E) -> ids (T, K), scores (T, K), expert_counts (E).
struct TopK {
  Required<Device> device;
  Scoring scoring = Scoring::kSoftmaxOverChosen;
  int64_t K = 0;
  ConstTensor logits;
  ConstTensor selection_bias = {};  // (E) float32, for the sigmoid rules; optional
  Tensor ids;                       // out, int32 or int64
  Tensor scores;                    // out, float32
  Tensor expert_counts = {};        // out, int32; optional
  void* stream = nullptr;
  // Each token chooses among the experts of its topk_group best groups, of n_group.
  int64_t n_group = 1, topk_group = 1;
  GroupScore group_score = GroupScore::kTop2Sum;
  float routed_scaling_factor = 1;
};
inline void top_k(const TopK& given) {
  tilemoe_top_k_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.scoring = static_cast<tilemoe_scoring>(given.scoring);
  args.K = given.K;
  args.logits = given.logits, args.selection_bias = given.selection_bias;
  args.ids = given.ids, args.scores = given.scores, args.expert_counts = given.expert_counts;
  args.stream = given.stream;
  args.n_group = given.n_group, args.topk_group = given.topk_group;
  args.group_score = static_cast<tilemoe_group_score>(given.group_score);
  args.routed_scaling_factor = given.routed_scaling_factor;
  check(tilemoe_top_k(&args));
}

// logits (T, E), ids (T, K) chosen elsewhere -> scores (T, K), expert_counts (E).
struct TopKScores {
  Required<Device> device;
  Scoring scoring = Scoring::kSoftmaxOverChosen;
  float routed_scaling_factor = 1;
  ConstTensor logits;
  ConstTensor ids;            // int32 or int64
  Tensor scores;              // out, float32
  Tensor expert_counts = {};  // out, int32; optional
  void* stream = nullptr;
};
inline void top_k_scores(const TopKScores& given) {
  tilemoe_top_k_scores_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.scoring = static_cast<tilemoe_scoring>(given.scoring);
  args.routed_scaling_factor = given.routed_scaling_factor;
  args.logits = given.logits, args.ids = given.ids;
  args.scores = given.scores, args.expert_counts = given.expert_counts;
  args.stream = given.stream;
  check(tilemoe_top_k_scores(&args));
}

// ds (pairs) float32 -> dlogits (T, E).
struct RouterBackward {
  Scoring scoring = Scoring::kSoftmaxOverChosen;
  const Routing* routing = nullptr;
  ConstTensor logits = {};  // (T, E); may be absent for kSoftmaxOverChosen
  ConstTensor ds;
  Tensor dlogits;           // out
  bool accumulate = false;  // added to dlogits instead of written
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
  float routed_scaling_factor = 1;  // the scores' own
};
inline void router_backward(const RouterBackward& given) {
  tilemoe_router_backward_args args{};
  args.struct_size = sizeof args;
  args.scoring = static_cast<tilemoe_scoring>(given.scoring);
  args.accumulate = given.accumulate;
  args.routing = given.routing;
  args.logits = given.logits, args.ds = given.ds, args.dlogits = given.dlogits;
  args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
  args.stream = given.stream;
  args.routed_scaling_factor = given.routed_scaling_factor;
  check(tilemoe_router_backward(&args));
}

inline size_t router_losses_workspace_bytes(Device device, int64_t T, int64_t E) {
  size_t size = 0;
  check(tilemoe_router_losses_workspace_bytes(to_c(device), T, E, &size));
  return size;
}

// losses (2) float32: balance, z. If dlogits is present, the gradient of
// balance_coefficient * balance + z_coefficient * z is added to it.
struct RouterLosses {
  Required<Device> device;
  float balance_coefficient = 0;
  float z_coefficient = 0;
  ConstTensor logits;         // (T, E)
  ConstTensor expert_counts;  // (E) int32
  Tensor losses = {};         // out; optional
  Tensor dlogits = {};        // (T, E), added to; optional
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
};
inline void router_losses(const RouterLosses& given) {
  tilemoe_router_losses_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(given.device);
  args.balance_coefficient = given.balance_coefficient, args.z_coefficient = given.z_coefficient;
  args.logits = given.logits, args.expert_counts = given.expert_counts;
  args.losses = given.losses, args.dlogits = given.dlogits;
  args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
  args.stream = given.stream;
  check(tilemoe_router_losses(&args));
}

}  // namespace tilemoe
