// gathered_mm and combine_mm in C++: the GEMMs of the layer one by one, for activations of the
// caller. Semantics, shapes and errors are documented in tilemoe.h; every call throws tilemoe::Error
// on a bad argument, before anything is written.
//
//   const Experts first{.device = Device::kCpu, .d = 256, .n = 128, .E = 16,
//                       .activation = Activation::kIdentity};
//   gathered_mm(first, {.routing = &routing, .X = X, .W = W1, .H = H, ...});
#pragma once

#include "tilemoe/layer.h"

namespace tilemoe {

// The memory of a call, and its stream.
struct MmMemory {
  void* workspace = nullptr;
  size_t workspace_bytes = 0;
  void* stream = nullptr;
  int block_turns = 0;

  template <class Args>
  void write_to(Args& args) const {
    args.struct_size = sizeof args;
    args.workspace = workspace, args.workspace_bytes = workspace_bytes, args.stream = stream;
    args.block_turns = block_turns;
  }
};

struct GatheredMmArgs {
  const tilemoe_routing* routing = nullptr;
  ConstTensor X = {};  // (T, d); grouped: (capacity, d)
  ConstTensor W = {};  // (E, n, d)
  ConstTensor b = {};  // (E, n); optional
  Tensor H = {};       // out (capacity, n)
  MmMemory memory = {};
};

struct GatheredMmBackwardArgs {
  const tilemoe_routing* routing = nullptr;
  ConstTensor X = {}, W = {};
  ConstTensor dH = {};      // (capacity, n)
  Tensor dX = {};           // out, X's shape; as all below, computed if it is given
  ConstTensor addend = {};  // added to dX; optional
  Tensor dW = {}, db = {};
  bool accumulate = false;  // dW and db are added to instead of written
  MmMemory memory = {};
};

struct CombineMmArgs {
  const tilemoe_routing* routing = nullptr;
  ConstTensor A = {};       // (capacity, n)
  ConstTensor W = {};       // (E, d, n)
  ConstTensor b = {};       // (E, d); optional
  Tensor O = {};            // out (T, d); grouped: (capacity, d)
  ConstTensor addend = {};  // O's shape; optional
  MmMemory memory = {};
};

struct CombineMmBackwardArgs {
  const tilemoe_routing* routing = nullptr;
  ConstTensor A = {}, W = {}, b = {};
  ConstTensor dO = {};  // O's shape
  Tensor dA = {};       // out (capacity, n); as all below, computed if it is given
  Tensor ds = {};       // (pairs) float32, or (T, K) for top-K
  Tensor dW = {}, db = {};
  bool accumulate = false;  // dW and db are added to instead of written
  MmMemory memory = {};
};

inline void gathered_mm(const Experts& experts, const GatheredMmArgs& given) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_gathered_mm_args args{};
  given.memory.write_to(args);
  args.routing = given.routing;
  args.X = given.X, args.W = given.W, args.b = given.b, args.H = given.H;
  check(tilemoe_gathered_mm(&c_experts, &args));
}

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

inline void combine_mm(const Experts& experts, const CombineMmArgs& given) {
  const tilemoe_experts c_experts = experts.to_c();
  tilemoe_combine_mm_args args{};
  given.memory.write_to(args);
  args.routing = given.routing;
  args.A = given.A, args.W = given.W, args.b = given.b, args.O = given.O;
  args.addend = given.addend;
  check(tilemoe_combine_mm(&c_experts, &args));
}

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

// `gradients` are those of a backward, as in tilemoe_mm_workspace_query.
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
