// A layer's forward and backward with every argument right, for the argument tests to spoil.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <string>
#include <vector>

#include "arguments_support.h"

namespace tilemoe::arguments {

constexpr int64_t kT = 7, kD = 24, kN = 16, kE = 5, kK = 3;

// The layer's workspace, which is large: one for all problems, made anew only after a call wrote
// it.
class SharedWorkspace {
 public:
  static constexpr unsigned char kFill = 0xA5;

  void* take(size_t bytes) {
    if (bytes > bytes_.size() || !clean()) bytes_.assign(std::max(bytes, bytes_.size()), kFill);
    return bytes_.data();
  }
  bool clean() const {
    return bytes_.empty() || (bytes_[0] == kFill && std::memcmp(bytes_.data(), bytes_.data() + 1,
                                                                bytes_.size() - 1) == 0);
  }

 private:
  std::vector<unsigned char> bytes_;
};
inline SharedWorkspace shared_workspace;

// A layer over routing of the given kind, up to the workspace that forward and backward share.
struct LayerProblem {
  Arena arena;
  tilemoe_experts experts{};
  tilemoe_routing_spec spec{};
  tilemoe_routing routing{};
  tilemoe_weights weights{}, dweights{};
  tilemoe_saved saved{};
  tilemoe_forward_args forward{};
  tilemoe_backward_args backward{};

  // All tokens and rows, for a test to give it.
  tilemoe_part whole_part() const {
    tilemoe_part part{};
    part.struct_size = sizeof part;
    part.begins = routing.offsets, part.ends = routing.offsets + 1;
    part.tokens = routing.spec.T;
    return part;
  }

  explicit LayerProblem(bool split = false, bool grouped = false) {
    experts.struct_size = sizeof experts;
    experts.d = kD, experts.n = kN, experts.E = kE;
    experts.gate_layout = split ? TILEMOE_GATE_SPLIT : TILEMOE_GATE_CONCATENATED;
    spec.struct_size = sizeof spec;
    spec.E = kE;
    if (grouped) {
      spec.kind = TILEMOE_ROUTING_GROUPED, spec.capacity = kT;
    } else {
      spec.T = kT, spec.K = kK;
    }
    bind_and_route(grouped);
    saved.struct_size = sizeof saved;
    saved.H = zeros({routing.spec.capacity, 2 * kN});
    weights = new_weights(split), dweights = new_weights(split);

    forward.struct_size = sizeof forward;
    forward.routing = &routing;
    forward.weights = &weights;
    forward.X = floats({kT, kD});
    forward.O = floats({kT, kD});
    forward.addend = floats({kT, kD});
    forward.saved = &saved;

    backward.struct_size = sizeof backward;
    backward.routing = &routing;
    backward.weights = &weights;
    backward.X = forward.X;
    backward.dO = floats({kT, kD});
    backward.saved = &saved;
    backward.dX = floats({kT, kD});
    backward.addend = floats({kT, kD});
    backward.dweights = &dweights;
    backward.ds = floats({routing.spec.pairs});

    const size_t needed = std::max(forward_workspace(), backward_workspace(TILEMOE_BACKWARD_WHOLE));
    forward.workspace = backward.workspace = shared_workspace.take(needed);
    forward.workspace_bytes = backward.workspace_bytes = needed;
  }
  LayerProblem(const LayerProblem&) = delete;
  LayerProblem& operator=(const LayerProblem&) = delete;

  bool accepts(const std::string&, tilemoe_dtype dtype) const { return dtype == TILEMOE_FLOAT32; }
  bool accepts_ndim(const std::string&, int) const { return false; }
  std::vector<int64_t> host_outputs() const {
    return {saved.state, static_cast<int64_t>(reinterpret_cast<intptr_t>(saved.dH)),
            shared_workspace.clean()};
  }

  size_t forward_workspace() const {
    return workspace_bytes(TILEMOE_PASS_FORWARD, TILEMOE_BACKWARD_WHOLE, 0);
  }
  size_t backward_workspace(tilemoe_backward_mode mode, uint32_t gradients = 0) const {
    return workspace_bytes(TILEMOE_PASS_BACKWARD, mode, gradients);
  }

  static void require(tilemoe_status status) {
    if (status != TILEMOE_SUCCESS) throw std::runtime_error(tilemoe_last_error());
  }

 private:
  size_t workspace_bytes(tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) const {
    tilemoe_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec;
    query.pass = pass, query.mode = mode, query.gradients = gradients;
    size_t bytes = 0;
    require(tilemoe_workspace_bytes(&query, &bytes));
    return bytes;
  }

  tilemoe_tensor floats(std::vector<int64_t> shape) {
    return new_tensor(arena, TILEMOE_FLOAT32, shape);
  }
  tilemoe_tensor zeros(std::vector<int64_t> shape) {
    const tilemoe_tensor view = floats(shape);
    std::memset(view.data, 0, sizeof(float) * static_cast<size_t>(shape[0] * shape[1]));
    return view;
  }

  tilemoe_weights new_weights(bool split) {
    tilemoe_weights all{};
    all.struct_size = sizeof all;
    const int64_t rows = split ? kN : 2 * kN;
    all.W1 = floats({kE, rows, kD});
    all.W2 = floats({kE, kD, kN});
    all.b1 = floats({kE, rows});
    all.b2 = floats({kE, kD});
    if (split) all.W1_up = floats({kE, kN, kD}), all.b1_up = floats({kE, kN});
    return all;
  }

  void bind_and_route(bool grouped) {
    size_t bytes = 0;
    require(tilemoe_routing_bytes(&spec, &bytes));
    routing.struct_size = sizeof routing;
    require(tilemoe_routing_bind(&spec, arena.take(bytes), bytes, &routing));
    if (grouped) {
      tilemoe_route_grouped_args args{};
      args.struct_size = sizeof args;
      args.counts = new_tensor(arena, TILEMOE_INT32, {kE});
      static_cast<int32_t*>(args.counts.data)[1] = kT;
      require(tilemoe_route_grouped(&routing, &args));
      return;
    }
    tilemoe_route_top_k_args args{};
    args.struct_size = sizeof args;
    args.ids = new_tensor(arena, TILEMOE_INT32, {kT, kK});
    for (int64_t pair = 0; pair < kT * kK; ++pair)
      static_cast<int32_t*>(args.ids.data)[pair] = static_cast<int32_t>(pair % kE);
    args.scores = floats({kT, kK});
    require(tilemoe_routing_workspace_bytes(&spec, &bytes));
    args.workspace = arena.take(bytes), args.workspace_bytes = bytes;
    require(tilemoe_route_top_k(&routing, &args));
  }
};

}  // namespace tilemoe::arguments
