// The calls of the layer, forward and backward: the arguments of the caller, read and checked, and the
// kernels and the memory plan for them. Until that is done, nothing is written.
#pragma once

#include <optional>

#include "core/backend.h"
#include "layer/arguments.h"
#include "layer/workspace.h"

namespace tilemoe {

// Arguments that their reader has checked, all but the workspace.
struct CheckedCall {
  const tilemoe_experts& experts;
  const tilemoe_routing& routing;
  const tilemoe_weights& weights;  // both: of one that is not read, the sizes and strides
};

// The arguments, in the structs of this version.
class ForwardCall {
 public:
  ForwardCall(const tilemoe_experts* experts, const tilemoe_forward_args* args);
  // One of the GEMMs: without adapters, quantised weights, a saved state and parts.
  ForwardCall(const CheckedCall& checked, const tilemoe_forward_args& args, Gemms gemms);

  const tilemoe_experts experts;
  const tilemoe_forward_args args;
  const tilemoe_routing routing;
  const tilemoe_quantized_weights quantized;  // zero without any
  const tilemoe_weights weights;   // with what steps need of quantised ones but data (quantized.h)
  const tilemoe_packed_lora lora;  // zero without adapters
  const tilemoe_saved saved;       // zero in inference
  const std::optional<tilemoe_part> part;
  const tilemoe_tensor X;  // of X as codes: the shape alone
  const Backend& backend;
  const KernelPlan kernels;
  const ForwardPlan plan;
  const Gemms gemms = Gemms::kBoth;

 private:
  tilemoe_weights checked_weights() const;
  tilemoe_tensor checked_X() const;
  KernelPlan checked_kernels() const;  // of arguments that it checks
  void check_memory() const;
};

class BackwardCall {
 public:
  BackwardCall(const tilemoe_experts* experts, const tilemoe_backward_args* args);
  // The gradients of one of the GEMMs: `saved` has H, or A in its place, and `dH` is the caller's.
  BackwardCall(const CheckedCall& checked, const tilemoe_backward_args& args,
               const tilemoe_weights& gradients, const tilemoe_saved& saved,
               const BackwardWork& work, const tilemoe_tensor& dH);

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
  const tilemoe_tensor dH = {};  // absent: over H, or in the workspace
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

// Runs the steps of a call, with A in the workspace of its plan, or the caller's A.
void run_forward(const ForwardCall& call, const tilemoe_tensor& A, StepObserver* observer);
// The same; `saved` is brought up to date.
void run_backward(const BackwardCall& call, tilemoe_saved& saved, StepObserver* observer);

// The backward that a query describes. Throws if the pass of the query is another.
BackwardWork work_of(const tilemoe_workspace_query& query, const tilemoe_experts& experts);

}  // namespace tilemoe
