// The limits of the CUDA kernels that a layer's arguments can exceed, checked before anything is
// written or launched.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

// Throws Error(kUnsupported) with the tensor and the limit.
void check_call_limits(const LayerTensors& tensors);

}  // namespace tilemoe::cuda
