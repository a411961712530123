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

enum class Rounding : int {
  kNearest = TILEMOE_ROUND_NEAREST,
  kUp = TILEMOE_ROUND_UP,
  kDown = TILEMOE_ROUND_DOWN,
  kStochastic = TILEMOE_ROUND_STOCHASTIC,
  kBalanced = TILEMOE_ROUND_BALANCED,
};

// The size of a routing; host data only.
struct RoutingSpec : tilemoe_routing_spec {
  static RoutingSpec top_k(int64_t T, int64_t E, int64_t K, Device device = Device::kCpu) {
    RoutingSpec spec(TILEMOE_ROUTING_TOP_K, device);
    spec.T = T, spec.E = E, spec.K = K;
    return spec;
  }
  // `pairs` triples over T tokens.
  static RoutingSpec general(int64_t T, int64_t E, int64_t pairs, Device device = Device::kCpu) {
    RoutingSpec spec(TILEMOE_ROUTING_GENERAL, device);
    spec.T = T, spec.E = E, spec.pairs = pairs;
    return spec;
  }
  static RoutingSpec rounded(int64_t T, int64_t E, int64_t K, Rounding rule, int64_t m = 128,
                             Device device = Device::kCpu) {
    RoutingSpec spec(TILEMOE_ROUTING_ROUNDED, device);
    spec.T = T, spec.E = E, spec.K = K, spec.m = m;
    spec.rounding = static_cast<tilemoe_rounding>(rule);
    return spec;
  }
  static RoutingSpec grouped(int64_t rows, int64_t E, Device device = Device::kCpu) {
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

 private:
  RoutingSpec(tilemoe_routing_kind routing_kind, Device where) : tilemoe_routing_spec{} {
    struct_size = sizeof(tilemoe_routing_spec);
    device = to_c(where);
    kind = routing_kind;
  }
};

// The routing of a batch, in `bytes` bytes of the caller's at `memory`, which must outlive it.
class Routing : public tilemoe_routing {
 public:
  Routing(const RoutingSpec& size, void* memory, size_t bytes) : tilemoe_routing{} {
    check(tilemoe_routing_bind(&size, memory, bytes, this));
  }

  // ids, scores (T, K)
  void from_top_k(const Tensor& ids, const Tensor& scores, void* workspace, size_t workspace_bytes,
                  void* stream = nullptr) {
    tilemoe_route_top_k_args args{};
    args.struct_size = sizeof args;
    args.ids = ids, args.scores = scores;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_top_k(this, &args));
  }
  // tokens, experts, scores (pairs)
  void from_triples(const Tensor& tokens, const Tensor& experts, const Tensor& scores,
                    void* workspace, size_t workspace_bytes, void* stream = nullptr) {
    tilemoe_route_general_args args{};
    args.struct_size = sizeof args;
    args.tokens = tokens, args.experts = experts, args.scores = scores;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_general(this, &args));
  }
  // logits (T, E); seed and step (1) int64, for stochastic rounding; expert_counts out (E) int32,
  // optional
  void from_logits_rounded(const Tensor& logits, void* workspace, size_t workspace_bytes,
                           const Tensor& seed = {}, const Tensor& step = {},
                           const Tensor& expert_counts = {}, void* stream = nullptr) {
    tilemoe_route_rounded_args args{};
    args.struct_size = sizeof args;
    args.logits = logits, args.seed = seed, args.step = step, args.expert_counts = expert_counts;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_rounded(this, &args));
  }
  // counts (E); scores (rows), optional
  void from_counts(const Tensor& counts, const Tensor& row_scores = {}, void* stream = nullptr) {
    tilemoe_route_grouped_args args{};
    args.struct_size = sizeof args;
    args.counts = counts, args.scores = row_scores, args.stream = stream;
    check(tilemoe_route_grouped(this, &args));
  }

  int64_t pairs() const { return spec.pairs; }
  int64_t capacity() const { return spec.capacity; }
};

// logits (T, E) -> ids (T, K) int32 or int64, scores (T, K) float32, expert_counts (E) int32,
// optional. selection_bias (E) float32 for the sigmoid rules.
inline void top_k(Scoring scoring, int64_t K, const Tensor& logits, const Tensor& ids,
                  const Tensor& scores, const Tensor& selection_bias = {},
                  const Tensor& expert_counts = {}, Device device = Device::kCpu,
                  void* stream = nullptr) {
  tilemoe_top_k_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(device);
  args.scoring = static_cast<tilemoe_scoring>(scoring);
  args.K = K;
  args.logits = logits, args.selection_bias = selection_bias;
  args.ids = ids, args.scores = scores, args.expert_counts = expert_counts;
  args.stream = stream;
  check(tilemoe_top_k(&args));
}

// ds (pairs) float32 -> dlogits (T, E), written (beta 0) or added to (beta 1). logits may be absent
// for kSoftmaxOverChosen.
inline void router_backward(Scoring scoring, const Routing& routing, const Tensor& logits,
                            const Tensor& ds, const Tensor& dlogits, void* workspace,
                            size_t workspace_bytes, float beta = 0, void* stream = nullptr) {
  tilemoe_router_backward_args args{};
  args.struct_size = sizeof args;
  args.scoring = static_cast<tilemoe_scoring>(scoring);
  args.routing = &routing;
  args.logits = logits, args.ds = ds, args.dlogits = dlogits, args.beta = beta;
  args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
  check(tilemoe_router_backward(&args));
}

inline size_t router_losses_workspace_bytes(int64_t T, int64_t E, Device device = Device::kCpu) {
  size_t size = 0;
  check(tilemoe_router_losses_workspace_bytes(to_c(device), T, E, &size));
  return size;
}

// losses (2) float32: balance, z. Where dlogits is present, the gradient of
// balance_coefficient * balance + z_coefficient * z is added to it.
inline void router_losses(const Tensor& logits, const Tensor& expert_counts, const Tensor& losses,
                          void* workspace, size_t workspace_bytes, float balance_coefficient = 0,
                          float z_coefficient = 0, const Tensor& dlogits = {},
                          Device device = Device::kCpu, void* stream = nullptr) {
  tilemoe_router_losses_args args{};
  args.struct_size = sizeof args;
  args.device = to_c(device);
  args.logits = logits, args.expert_counts = expert_counts, args.losses = losses;
  args.balance_coefficient = balance_coefficient, args.z_coefficient = z_coefficient;
  args.dlogits = dlogits;
  args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
  check(tilemoe_router_losses(&args));
}

}  // namespace tilemoe
