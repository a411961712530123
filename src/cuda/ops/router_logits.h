// Logits of a router in one order of the sum (router_logits.cu).
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/step_arguments.h"

namespace tilemoe::cuda {

// `has_wgmma` returns whether the arch sm90 runs on the current device.
void router_logits(const tilemoe_router_logits_args& args, bool (*has_wgmma)());
size_t router_logits_scratch_bytes(int64_t T, int64_t E, int64_t d, tilemoe_dtype weight);

}  // namespace tilemoe::cuda
