// The routing of a batch as one opaque int32 tensor, laid out by tilemoe_routing_bind.
#pragma once

#include <tuple>

#include "call.h"
#include "packing.h"

namespace tilemoe_torch {

inline tilemoe_routing_spec routing_spec(const Call& call, tilemoe_routing_kind kind, int64_t T,
                                         int64_t E, int64_t K, int64_t capacity) {
  tilemoe_routing_spec spec{};
  spec.struct_size = sizeof spec;
  spec.device = call.device();
  spec.kind = kind;
  spec.T = T, spec.E = E, spec.K = K;
  if (kind == TILEMOE_ROUTING_GENERAL) spec.pairs = capacity;
  spec.capacity = capacity;
  // Reading an existing routing does not depend on the rounding that built it.
  spec.rounding = TILEMOE_ROUND_DOWN;
  spec.m = 1;
  return spec;
}

// A new routing, to be filled in.
class NewRouting {
 public:
  NewRouting(const Call& call, const tilemoe_routing_spec& spec);
  // With another size of workspace than most calls need.
  NewRouting(const Call& call, const tilemoe_routing_spec& spec, size_t workspace_bytes);

  tilemoe_routing& get() { return routing_; }
  void* workspace() const { return workspace_.data_ptr(); }
  size_t workspace_bytes() const { return workspace_bytes_; }
  const Tensor& tensor() const { return tensor_; }

 private:
  Tensor tensor_;  // (bytes / 4) int32
  size_t workspace_bytes_ = 0;
  Tensor workspace_;
  tilemoe_routing routing_{};
};

// Routes by the logits: the routing, and how often each expert was chosen (E).
std::tuple<Tensor, Tensor> choose_and_route(const Call& call, const Tensor& logits,
                                            const MaybeTensor& selection_bias, const Rule& rule,
                                            double routed_scaling_factor);

// The router for a small T.
struct TokenRouter {
  const Tensor& weight;               // (E, d)
  const MaybeTensor& bias;            // (E)
  const MaybeTensor& selection_bias;  // (E)
  ScalarType logits_dtype;
};
// Routes tokens X (T, d) for a small T: the routing, how often each expert was chosen (E), and the
// logits (T, E) if they are wanted, else empty.
std::tuple<Tensor, Tensor, Tensor> route_tokens(const Call& call, const Tensor& X,
                                                const TokenRouter& router, const Rule& rule,
                                                double routed_scaling_factor, bool wants_logits);

// The routing in `tensor`.
tilemoe_routing bind_routing(const Call& call, const tilemoe_routing_spec& spec,
                             const Tensor& tensor);

// Memory for building a routing of `spec`, or for its backward.
Tensor routing_workspace(const Call& call, const tilemoe_routing_spec& spec, size_t* bytes);

}  // namespace tilemoe_torch
