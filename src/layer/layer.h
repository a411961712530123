// The layer and sum_rows: the order of the steps, the same for every backend. call.h reads and checks
// the arguments, workspace.h places the tensors in the workspace.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

class StepObserver;

tilemoe_saved_size saved_bytes(const tilemoe_experts* experts, const tilemoe_routing_spec* routing);
size_t workspace_bytes(const tilemoe_workspace_query* query);
// `observer`, unless null, sees each step begin and end.
void forward(const tilemoe_experts* experts, const tilemoe_forward_args* args,
             StepObserver* observer = nullptr);
void backward(const tilemoe_experts* experts, const tilemoe_backward_args* args,
              StepObserver* observer = nullptr);

// The GEMMs one by one, for activations of the caller.
void gathered_mm(const tilemoe_experts* experts, const tilemoe_gathered_mm_args* args);
void gathered_mm_backward(const tilemoe_experts* experts,
                          const tilemoe_gathered_mm_backward_args* args);
void combine_mm(const tilemoe_experts* experts, const tilemoe_combine_mm_args* args);
void combine_mm_backward(const tilemoe_experts* experts,
                         const tilemoe_combine_mm_backward_args* args);
size_t mm_workspace_bytes(const tilemoe_mm_workspace_query* query);

// Codes and scales of the fp8 recipe: checks the arguments and calls the backend of the device.
void quantize_fp8(const tilemoe_quantize_fp8_args* args);
// Sums rows of several arrays: checks the arguments and calls the backend of the device.
void sum_rows(const tilemoe_sum_rows_args* args);

}  // namespace tilemoe
