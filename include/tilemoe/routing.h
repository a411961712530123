/// @file
/// Routing in C++: the assignment of tokens to experts. The functions of the same name in tilemoe.h
/// document semantics, units and sources; every call throws tilemoe::Error on a bad argument.
#pragma once

#include <cstddef>
#include <cstdint>

#include "tilemoe/tensor.h"

namespace tilemoe {

/// How scores are computed from logits, see tilemoe_scoring.
enum class Scoring : int {
  kSoftmaxOverChosen = TILEMOE_SOFTMAX_OVER_CHOSEN,
  kSoftmaxOverAll = TILEMOE_SOFTMAX_OVER_ALL,
  kSoftmaxRenormalized = TILEMOE_SOFTMAX_RENORMALIZED,
  kSigmoid = TILEMOE_SIGMOID,
  kSigmoidRenormalized = TILEMOE_SIGMOID_RENORMALIZED,
};

/// Score of a group of experts, see tilemoe_group_score.
enum class GroupScore : int {
  kTop2Sum = TILEMOE_GROUP_TOP2_SUM,
  kMax = TILEMOE_GROUP_MAX,
};

/// Rounding of an expert's count under token rounding, see tilemoe_rounding.
enum class Rounding : int {
  kNearest = TILEMOE_ROUND_NEAREST,
  kUp = TILEMOE_ROUND_UP,
  kDown = TILEMOE_ROUND_DOWN,
  kStochastic = TILEMOE_ROUND_STOCHASTIC,
  kBalanced = TILEMOE_ROUND_BALANCED,
};

/// Sizes of a routing; host memory only.
struct RoutingSpec : tilemoe_routing_spec {
  /// Sizes of a top-K routing of T tokens to K of E experts.
  static RoutingSpec top_k(Device device, int64_t T, int64_t E, int64_t K) {
    RoutingSpec spec(TILEMOE_ROUTING_TOP_K, device);
    spec.T = T, spec.E = E, spec.K = K;
    return spec;
  }
  /// Sizes of a routing of `pairs` triples (token, expert, score) of T tokens.
  static RoutingSpec general(Device device, int64_t T, int64_t E, int64_t pairs) {
    RoutingSpec spec(TILEMOE_ROUTING_GENERAL, device);
    spec.T = T, spec.E = E, spec.pairs = pairs;
    return spec;
  }
  /// Sizes of a routing with token rounding to multiples of m, for each `round_tokens` tokens
  /// separately; 0: all T together.
  static RoutingSpec rounded(Device device, int64_t T, int64_t E, int64_t K, Rounding rule,
                             int64_t m = 128, int64_t round_tokens = 0) {
    RoutingSpec spec(TILEMOE_ROUTING_ROUNDED, device);
    spec.T = T, spec.E = E, spec.K = K, spec.m = m, spec.round_tokens = round_tokens;
    spec.rounding = static_cast<tilemoe_rounding>(rule);
    return spec;
  }
  /// Sizes of a routing of `rows` rows that are already sorted by expert.
  static RoutingSpec grouped(Device device, int64_t rows, int64_t E) {
    RoutingSpec spec(TILEMOE_ROUTING_GROUPED, device);
    spec.E = E, spec.capacity = rows;
    return spec;
  }

  /// Returns the upper bound on rows, see tilemoe_routing_capacity().
  int64_t bound() const {
    int64_t rows = 0;
    check(tilemoe_routing_capacity(this, &rows));
    return rows;
  }
  /// Returns the bytes of a Routing's memory.
  size_t bytes() const {
    size_t size = 0;
    check(tilemoe_routing_bytes(this, &size));
    return size;
  }
  /// Returns the bytes of the workspace of Routing's functions and of router_backward().
  size_t workspace_bytes() const {
    size_t size = 0;
    check(tilemoe_routing_workspace_bytes(this, &size));
    return size;
  }
  /// Returns the bytes of the workspace of Routing::from_tokens() for tokens of width d.
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

/// Arguments of Routing::from_logits(), see tilemoe_route_rounded().
struct RoundedRouting {
  ConstTensor logits;          ///< (T, E) float32, bfloat16 or float16
  ConstTensor seed = {};       ///< (1) int64; stochastic rounding only
  ConstTensor step = {};       ///< (1) int64; stochastic rounding only
  Tensor expert_counts = {};   ///< out (E) int32, before rounding; optional
  void* workspace = nullptr;   ///< any contents
  size_t workspace_bytes = 0;  ///< at least RoutingSpec::workspace_bytes()
  void* stream = nullptr;      ///< cudaStream_t
};

/// Arguments of Routing::from_tokens(), see tilemoe_route_tokens().
struct TokenRouting {
  Scoring scoring = Scoring::kSoftmaxOverChosen;  ///< the scoring rule
  Required<DType> logits_dtype;                   ///< dtype that the logits are rounded to
  ConstTensor X;                                  ///< (T, d) float32, bfloat16 or float16
  ConstTensor router_weight;                      ///< (E, d) X's dtype or float32
  ConstTensor router_bias = {};                   ///< (E); optional
  ConstTensor selection_bias = {};                ///< (E) float32, sigmoid scorings only; optional
  Tensor logits = {};                             ///< out (T, E) logits_dtype; optional
  Tensor expert_counts = {};                      ///< out (E) int32; optional
  int64_t n_group = 1;                            ///< groups of experts
  int64_t topk_group = 1;                         ///< groups per token
  GroupScore group_score = GroupScore::kTop2Sum;  ///< score of a group
  float routed_scaling_factor = 1;                ///< factor of every score
  void* workspace = nullptr;                      ///< any contents
  size_t workspace_bytes = 0;  ///< at least RoutingSpec::route_tokens_workspace_bytes()
  void* stream = nullptr;      ///< cudaStream_t
};

/// The routing of a batch.
class Routing : public tilemoe_routing {
 public:
  /// Lays the arrays out in `bytes` bytes at `memory`, aligned to 16. The memory must outlive the
  /// routing.
  Routing(const RoutingSpec& size, void* memory, size_t bytes) : tilemoe_routing{} {
    struct_size = sizeof(tilemoe_routing);
    check(tilemoe_routing_bind(&size, memory, bytes, this));
  }

  /// Builds the routing from ids (T, K) and scores (T, K), see tilemoe_route_top_k().
  void from_top_k(const ConstTensor& ids, const ConstTensor& scores, void* workspace,
                  size_t workspace_bytes, void* stream = nullptr) {
    tilemoe_route_top_k_args args{};
    args.struct_size = sizeof args;
    args.ids = ids, args.scores = scores;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_top_k(this, &args));
  }
  /// Builds the routing from at most TILEMOE_ROUTE_TOKENS_MOST_T tokens and the router's weight,
  /// see tilemoe_route_tokens().
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
  /// Builds the routing from tokens, experts and scores (pairs), see tilemoe_route_general().
  void from_triples(const ConstTensor& tokens, const ConstTensor& experts,
                    const ConstTensor& scores, void* workspace, size_t workspace_bytes,
                    void* stream = nullptr) {
    tilemoe_route_general_args args{};
    args.struct_size = sizeof args;
    args.tokens = tokens, args.experts = experts, args.scores = scores;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    check(tilemoe_route_general(this, &args));
  }
  /// Builds the routing from logits with token rounding, see tilemoe_route_rounded().
  void from_logits(const RoundedRouting& given) {
    tilemoe_route_rounded_args args{};
    args.struct_size = sizeof args;
    args.logits = given.logits, args.seed = given.seed, args.step = given.step;
    args.expert_counts = given.expert_counts;
    args.workspace = given.workspace, args.workspace_bytes = given.workspace_bytes;
    args.stream = given.stream;
    check(tilemoe_route_rounded(this, &args));
  }
  /// Builds the routing from counts (E) and optional scores (rows), see tilemoe_route_grouped().
  void from_counts(const ConstTensor& counts, const ConstTensor& row_scores = {},
                   void* stream = nullptr) {
    tilemoe_route_grouped_args args{};
    args.struct_size = sizeof args;
    args.counts = counts, args.scores = row_scores, args.stream = stream;
    check(tilemoe_route_grouped(this, &args));
  }

  /// Returns the number of pairs.
  int64_t pairs() const { return spec.pairs; }
  /// Returns the number of rows that the buffers can hold.
  int64_t capacity() const { return spec.capacity; }
};

/// Returns the bytes of the workspace of router_logits().
inline size_t router_logits_workspace_bytes(Device device, int64_t T, int64_t E, int64_t d,
                                            DType weight_dtype) {
  size_t size = 0;
  check(tilemoe_router_logits_workspace_bytes(to_c(device), T, E, d, to_c(weight_dtype), &size));
  return size;
}

/// Arguments of router_logits().
struct RouterLogits {
  Required<Device> device;     ///< device of the arrays
  ConstTensor X;               ///< (T, d) float32, bfloat16 or float16
  ConstTensor weight;          ///< (E, d) X's dtype or float32
  ConstTensor bias = {};       ///< (E); optional
  Tensor logits;               ///< out (T, E) float32, bfloat16 or float16
  void* workspace = nullptr;   ///< any contents
  size_t workspace_bytes = 0;  ///< at least router_logits_workspace_bytes()
  void* stream = nullptr;      ///< cudaStream_t
};
/// Computes the logits of a router with a fixed order of the sum, see tilemoe_router_logits().
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

/// Arguments of top_k().
struct TopK {
  Required<Device> device;                        ///< device of the arrays
  Scoring scoring = Scoring::kSoftmaxOverChosen;  ///< the scoring rule
  int64_t K = 0;                                  ///< experts per token
  ConstTensor logits;                             ///< (T, E) float32, bfloat16 or float16
  ConstTensor selection_bias = {};                ///< (E) float32, sigmoid scorings only; optional
  Tensor ids;                                     ///< out (T, K) int32 or int64
  Tensor scores;                                  ///< out (T, K) float32
  Tensor expert_counts = {};                      ///< out (E) int32; optional
  void* stream = nullptr;                         ///< cudaStream_t
  int64_t n_group = 1;                            ///< groups of experts
  int64_t topk_group = 1;                         ///< groups per token
  GroupScore group_score = GroupScore::kTop2Sum;  ///< score of a group
  float routed_scaling_factor = 1;                ///< factor of every score
};
/// Chooses the top K of each token's logits and computes their scores, see tilemoe_top_k().
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

/// Arguments of top_k_scores().
struct TopKScores {
  Required<Device> device;                        ///< device of the arrays
  Scoring scoring = Scoring::kSoftmaxOverChosen;  ///< the scoring rule
  float routed_scaling_factor = 1;                ///< factor of every score
  ConstTensor logits;                             ///< (T, E) float32, bfloat16 or float16
  ConstTensor ids;                                ///< (T, K) int32 or int64
  Tensor scores;                                  ///< out (T, K) float32
  Tensor expert_counts = {};                      ///< out (E) int32; optional
  void* stream = nullptr;                         ///< cudaStream_t
};
/// Computes the scores of experts that were chosen elsewhere, see tilemoe_top_k_scores().
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

/// Arguments of router_backward().
struct RouterBackward {
  Scoring scoring = Scoring::kSoftmaxOverChosen;  ///< rule of the choice
  const Routing* routing = nullptr;               ///< top-K or rounded routing
  ConstTensor logits = {};                        ///< (T, E); optional if the scores suffice
  ConstTensor ds;                                 ///< (pairs) float32
  Tensor dlogits;                                 ///< out (T, E), float32 or the logits' dtype
  bool accumulate = false;                        ///< true: add to dlogits instead of writing it
  void* workspace = nullptr;                      ///< any contents
  size_t workspace_bytes = 0;                     ///< at least RoutingSpec::workspace_bytes()
  void* stream = nullptr;                         ///< cudaStream_t
  float routed_scaling_factor = 1;                ///< factor of the scores
};
/// Computes the gradient of the logits from ds, see tilemoe_router_backward().
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

/// Returns the bytes of the workspace of router_losses().
inline size_t router_losses_workspace_bytes(Device device, int64_t T, int64_t E) {
  size_t size = 0;
  check(tilemoe_router_losses_workspace_bytes(to_c(device), T, E, &size));
  return size;
}

/// Arguments of router_losses().
struct RouterLosses {
  Required<Device> device;        ///< device of the arrays
  float balance_coefficient = 0;  ///< factor of the balance loss in dlogits
  float z_coefficient = 0;        ///< factor of the z loss in dlogits
  ConstTensor logits;             ///< (T, E) float32, bfloat16 or float16
  ConstTensor expert_counts;      ///< (E) int32, before rounding
  Tensor losses = {};             ///< out (2) float32: balance, z; optional
  Tensor dlogits = {};            ///< (T, E): the gradient of the losses is added to it; optional
  void* workspace = nullptr;      ///< any contents
  size_t workspace_bytes = 0;     ///< at least router_losses_workspace_bytes()
  void* stream = nullptr;         ///< cudaStream_t
};
/// Computes the auxiliary losses of a router, see tilemoe_router_losses().
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
