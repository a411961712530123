// The calls of the layer, forward and backward: the arguments of the caller, read and checked, and the
// kernels and the memory plan for them. Until that is done, nothing is written.
#pragma once

#include <optional>

#include "core/backend.h"
#include "layer/arguments.h"
#include "layer/workspace.h"

namespace tilemoe {

// The arguments, in the structs of this version.
class ForwardCall {
 public:
  ForwardCall(const tilemoe_experts* experts, const tilemoe_forward_args* args);

  const tilemoe_experts experts;
  const tilemoe_forward_args args;
  const tilemoe_routing routing;
  const tilemoe_quantized_weights quantized;  // zero without any
  const tilemoe_weights weights;   // with what steps need of quantised ones but data (quantized.h)
  const tilemoe_packed_lora lora;  // zero without adapters
  const tilemoe_saved saved;       // zero in inference
  const std::optional<tilemoe_part> part;
  const Backend& backend;
  const KernelPlan kernels;
  const ForwardPlan plan;

 private:
  tilemoe_weights checked_weights() const;
  KernelPlan checked_kernels() const;  // of arguments that it checks
  void check_memory() const;
};

class BackwardCall {
 public:
  BackwardCall(const tilemoe_experts* experts, const tilemoe_backward_args* args);

  const tilemoe_experts experts;
  const tilemoe_backward_args args;
  const tilemoe_routing routing;
  const tilemoe_quantized_weights quantized;
  const tilemoe_weights weights, gradients;
  const tilemoe_packed_lora lora;  // zero without adapters
  const tilemoe_lora lora_gradients;
  const tilemoe_saved saved;
  const std::optional<tilemoe_part> part;
  const Backend& backend;
  const BackwardWork work;
  const KernelPlan kernels;
  const BackwardPlan plan;

  // Whether the caller's saved state has the count of the parts' tokens: older structs lack it.
  bool counts_parts() const;

 private:
  tilemoe_weights checked_weights() const;
  BackwardWork requested_work() const;
  KernelPlan checked_kernels() const;  // of arguments that it checks
  void check_weight_gradients() const;
  void check_mode() const;
  void check_parts() const;
  void check_memory() const;
};

// The backward that a query describes. Throws if the pass of the query is another.
BackwardWork work_of(const tilemoe_workspace_query& query, const tilemoe_experts& experts);

}  // namespace tilemoe
