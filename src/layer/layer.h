// The layer: the order of the steps, the same for every backend. What is asked for and its checks
// are in layer_call.h, the memory plan in layer_plan.h.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

class StepObserver;

tilemoe_saved_size saved_bytes(const tilemoe_experts* experts, const tilemoe_routing_spec* routing);
size_t workspace_bytes(const tilemoe_workspace_query* query);
// `observer`, where given, sees each step begin and end.
void forward(const tilemoe_experts* experts, const tilemoe_forward_args* args,
             StepObserver* observer = nullptr);
void backward(const tilemoe_experts* experts, const tilemoe_backward_args* args,
              StepObserver* observer = nullptr);

// Sums of rows of several arrays: argument checks that no backend owns, then the backend of the
// device.

void sum_rows(const tilemoe_sum_rows_args* args);

}  // namespace tilemoe
