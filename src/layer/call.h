// What a call of the layer is asked for, read from the caller's structs and checked: nothing is
// written before.
#pragma once

#include <optional>

#include "core/backend.h"
#include "layer/workspace.h"

namespace tilemoe {

tilemoe_experts read_experts(const tilemoe_experts* experts);
// The spec, complete, and for the same experts and device.
tilemoe_routing_spec read_spec(const tilemoe_routing_spec* spec, const tilemoe_experts& experts);

// T, or the rows of the grouped entry: those of X, O, dO and dX.
int64_t outer_rows(const tilemoe_routing_spec& spec);

// The device's, if it can run these experts.
Backend& backend_of(const tilemoe_experts& experts);

// The arguments, as this version knows them.
class ForwardCall {
 public:
  ForwardCall(const tilemoe_experts* experts, const tilemoe_forward_args* args);

  const tilemoe_experts experts;
  const tilemoe_forward_args args;
  const tilemoe_routing routing;
  const tilemoe_weights weights;
  const tilemoe_saved saved;  // zero in inference
  const std::optional<tilemoe_part> part;
  Backend& backend;
  const ForwardPlan plan;

 private:
  void check_tensors() const;
  void check_memory() const;
};

class BackwardCall {
 public:
  BackwardCall(const tilemoe_experts* experts, const tilemoe_backward_args* args);

  const tilemoe_experts experts;
  const tilemoe_backward_args args;
  const tilemoe_routing routing;
  const tilemoe_weights weights, gradients;
  const tilemoe_saved saved;
  const std::optional<tilemoe_part> part;
  Backend& backend;
  const BackwardWork work;
  const BackwardPlan plan;

  // Whether the caller's saved state has the count of the parts' tokens, which older ones lack.
  bool counts_parts() const;

 private:
  BackwardWork requested_work() const;
  void check_tensors() const;
  void check_weight_gradients() const;
  void check_mode() const;
  void check_parts() const;
  void check_memory() const;
};

// What a query asks about. Throws unless it is one of backward.
BackwardWork work_of(const tilemoe_workspace_query& query);

}  // namespace tilemoe
