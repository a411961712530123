// The layer: argument checks, the order of the kernels and the memory plan, the same for every
// backend.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

class Backend;

tilemoe_saved_size saved_bytes(const tilemoe_experts* experts, const tilemoe_routing_spec* routing);
size_t workspace_bytes(const tilemoe_experts* experts, const tilemoe_routing_spec* routing,
                       tilemoe_pass pass);
// `steps`, where given, runs the steps in place of the device's backend: a decorator of it that
// times each one.
void forward(const tilemoe_experts* experts, const tilemoe_forward_args* args,
             Backend* steps = nullptr);
void backward(const tilemoe_experts* experts, const tilemoe_backward_args* args,
              Backend* steps = nullptr);

}  // namespace tilemoe
