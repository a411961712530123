// A layer's forward and backward with every argument right, for the argument tests to change.
#pragma once

#include <algorithm>
#include <vector>

#include "arguments_routing_problem.h"

namespace tilemoe::arguments {

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
struct LayerProblem : RoutingProblem {
  tilemoe_experts experts{};
  tilemoe_weights weights{}, dweights{};
  tilemoe_saved saved{};
  tilemoe_forward_args forward{};
  tilemoe_backward_args backward{};
  tilemoe_part part{};  // all tokens and rows; in use only if a test sets it

  explicit LayerProblem(bool split = false, bool grouped = false)
      : RoutingProblem(grouped ? TILEMOE_ROUTING_GROUPED : TILEMOE_ROUTING_TOP_K, kT) {
    experts.struct_size = sizeof experts;
    experts.d = kD, experts.n = kN, experts.E = kE;
    experts.gate_layout = split ? TILEMOE_GATE_SPLIT : TILEMOE_GATE_CONCATENATED;
    route(grouped);
    part.struct_size = sizeof part;
    part.begins = routing.offsets, part.ends = routing.offsets + 1;
    part.tokens = routing.spec.T;
    saved.struct_size = sizeof saved;
    saved.H = integers({routing.spec.capacity, 2 * kN}, TILEMOE_FLOAT32);  // zeros
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
  std::vector<int64_t> host_outputs() const {
    return {saved.state, static_cast<int64_t>(reinterpret_cast<intptr_t>(saved.dH)),
            shared_workspace.clean()};
  }

  size_t forward_workspace() const {
    return workspace_of(TILEMOE_PASS_FORWARD, TILEMOE_BACKWARD_WHOLE, 0);
  }
  size_t backward_workspace(tilemoe_backward_mode mode, uint32_t gradients = 0) const {
    return workspace_of(TILEMOE_PASS_BACKWARD, mode, gradients);
  }

 private:
  size_t workspace_of(tilemoe_pass pass, tilemoe_backward_mode mode, uint32_t gradients) const {
    tilemoe_workspace_query query{};
    query.struct_size = sizeof query;
    query.experts = &experts, query.routing = &spec;
    query.pass = pass, query.mode = mode, query.gradients = gradients;
    size_t bytes = 0;
    require(tilemoe_workspace_bytes(&query, &bytes));
    return bytes;
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

  void route(bool grouped) {
    if (grouped) {
      tilemoe_route_grouped_args args{};
      args.struct_size = sizeof args;
      args.counts = integers({kE});
      static_cast<int32_t*>(args.counts.data)[1] = kT;
      require(tilemoe_route_grouped(&routing, &args));
    } else {
      const tilemoe_route_top_k_args args = top_k_args(kE);
      require(tilemoe_route_top_k(&routing, &args));
    }
  }
};

template <bool kBackward, bool kSplit = false, bool kGrouped = false>
struct Pass : LayerProblem {
  Pass() : LayerProblem(kSplit, kGrouped) {}
  const char* function() const { return kBackward ? "tilemoe_backward" : "tilemoe_forward"; }
  tilemoe_status call() {
    if constexpr (kBackward)
      return tilemoe_backward(experts_pointer, args_pointer);
    else
      return tilemoe_forward(experts_pointer, args_pointer);
  }
  auto& args() {
    if constexpr (kBackward)
      return backward;
    else
      return forward;
  }
  size_t needed() const {
    return kBackward ? backward_workspace(TILEMOE_BACKWARD_WHOLE) : forward_workspace();
  }
  tilemoe_part& use_part() {
    args().part = &part;
    return part;
  }
  void set_device(tilemoe_device device) { experts.device = routing.spec.device = device; }

  const tilemoe_experts* experts_pointer = &experts;
  const std::conditional_t<kBackward, tilemoe_backward_args, tilemoe_forward_args>* args_pointer =
      &args();
};

inline std::vector<float> values(const tilemoe_tensor& view) {
  const auto* const first = static_cast<const float*>(view.data);
  return {first, first + view.shape[0] * view.stride[0]};
}

}  // namespace tilemoe::arguments
