/// @file
/// gathered_mm and combine_mm in C++: the GEMMs of the layer, one by one, for activations that
/// Activation lacks. tilemoe.h documents semantics, shapes and errors; every call throws
/// tilemoe::Error on a bad argument, before it writes anything.
///
///     const Experts first{.device = Device::kCpu, .d = 256, .n = 128, .E = 16,
///                         .activation = Activation::kIdentity};
///     gathered_mm(first, {.routing = &routing, .X = X, .W = W1, .H = H, ...});
#pragma once

#include "tilemoe/layer.h"

namespace tilemoe {

/// Workspace and stream of a call.
struct MmMemory {
  void* workspace = nullptr;   ///< any contents, aligned to 16 bytes
  size_t workspace_bytes = 0;  ///< at least mm_workspace_bytes()
  void* stream = nullptr;      ///< cudaStream_t
  int block_turns = 0;         ///< CUDA: CTAs per SM of a GEMM, see tilemoe_forward_args

  /// Writes the members, and the struct's size, to the arguments of a C call.
  template <class Args>
  void write_to(Args& args) const {
    args.struct_size = sizeof args;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    args.block_turns = block_turns;
  }
};

/// Arguments of gathered_mm().
struct GatheredMmArgs {
  const tilemoe_routing* routing = nullptr;  ///< the routing of the batch
  ConstTensor X = {};                        ///< (T, d); grouped: (capacity, d)
  ConstTensor W = {};                        ///< (E, n, d)
  ConstTensor b = {};                        ///< (E, n); optional
  Tensor H = {};                             ///< out (capacity, n)
  MmMemory memory = {};                      ///< workspace and stream
};

/// Arguments of gathered_mm_backward(). The gradient of an absent output is not computed.
struct GatheredMmBackwardArgs {
  const tilemoe_routing* routing = nullptr;  ///< as in forward
  ConstTensor X = {};                        ///< as in forward
  ConstTensor W = {};                        ///< as in forward
  ConstTensor dH = {};                       ///< (capacity, n)
  Tensor dX = {};                            ///< out, X's shape
  ConstTensor addend = {};                   ///< added to dX; X's shape; optional
  Tensor dW = {};                            ///< out, W's shape
  Tensor db = {};                            ///< out (E, n)
  bool accumulate = false;                   ///< true: add to dW and db instead of writing them
  MmMemory memory = {};                      ///< workspace and stream
};

/// Arguments of combine_mm().
struct CombineMmArgs {
  const tilemoe_routing* routing = nullptr;  ///< the routing of the batch
  ConstTensor A = {};                        ///< (capacity, n)
  ConstTensor W = {};                        ///< (E, d, n)
  ConstTensor b = {};                        ///< (E, d); optional
  Tensor O = {};                             ///< out (T, d); grouped: (capacity, d)
  ConstTensor addend = {};                   ///< O's shape; optional
  MmMemory memory = {};                      ///< workspace and stream
};

/// Arguments of combine_mm_backward(). The gradient of an absent output is not computed.
struct CombineMmBackwardArgs {
  const tilemoe_routing* routing = nullptr;  ///< as in forward
  ConstTensor A = {};                        ///< as in forward
  ConstTensor W = {};                        ///< as in forward
  ConstTensor b = {};                        ///< as in forward; optional
  ConstTensor dO = {};                       ///< O's shape
  Tensor dA = {};                            ///< out (capacity, n)
  Tensor ds = {};                            ///< out (pairs) float32, or (T, K) for top-K
  Tensor dW = {};                            ///< out, W's shape
  Tensor db = {};                            ///< out (E, d)
  bool accumulate = false;                   ///< true: add to dW and db instead of writing them
  MmMemory memory = {};                      ///< workspace and stream
};

/// Gathers the rows of X and computes H, see tilemoe_gathered_mm().
inline void gathered_mm(const Experts& experts, const GatheredMmArgs& given) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_gathered_mm_args args{};
  given.memory.write_to(args);
  args.routing = given.routing;
  args.X = given.X, args.W = given.W, args.b = given.b, args.H = given.H;
  check(tilemoe_gathered_mm(&c_experts, &args));
}

/// Computes the gradients of gathered_mm(), see tilemoe_gathered_mm_backward().
inline void gathered_mm_backward(const Experts& experts, const GatheredMmBackwardArgs& given) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_gathered_mm_backward_args args{};
  given.memory.write_to(args);
  args.routing = given.routing;
  args.X = given.X, args.W = given.W, args.dH = given.dH;
  args.dX = given.dX, args.addend = given.addend, args.dW = given.dW, args.db = given.db;
  args.accumulate = given.accumulate;
  check(tilemoe_gathered_mm_backward(&c_experts, &args));
}

/// Computes O from A, see tilemoe_combine_mm().
inline void combine_mm(const Experts& experts, const CombineMmArgs& given) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_combine_mm_args args{};
  given.memory.write_to(args);
  args.routing = given.routing;
  args.A = given.A, args.W = given.W, args.b = given.b, args.O = given.O;
  args.addend = given.addend;
  check(tilemoe_combine_mm(&c_experts, &args));
}

/// Computes the gradients of combine_mm(), see tilemoe_combine_mm_backward().
inline void combine_mm_backward(const Experts& experts, const CombineMmBackwardArgs& given) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_combine_mm_backward_args args{};
  given.memory.write_to(args);
  args.routing = given.routing;
  args.A = given.A, args.W = given.W, args.b = given.b, args.dO = given.dO;
  args.dA = given.dA, args.ds = given.ds, args.dW = given.dW, args.db = given.db;
  args.accumulate = given.accumulate;
  check(tilemoe_combine_mm_backward(&c_experts, &args));
}

/// Returns the bytes of the workspace of a call; `gradients` as in tilemoe_mm_workspace_query.
inline size_t mm_workspace_bytes(const Experts& experts, const tilemoe_routing_spec& routing,
                                 tilemoe_mm mm, uint32_t gradients = 0) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_mm_workspace_query query{};
  query.struct_size = sizeof query;
  query.experts = &c_experts, query.routing = &routing;
  query.mm = mm, query.gradients = gradients;
  size_t size = 0;
  check(tilemoe_mm_workspace_bytes(&query, &size));
  return size;
}

}  // namespace tilemoe
