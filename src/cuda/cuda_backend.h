// The CUDA backend: routing and the router on GPUs from compute capability 8.0 on, the layer on
// those that have products (cuda/products.h).
#pragma once

#include "core/backend.h"

namespace tilemoe::cuda {

// The backend, or Error(kUnsupported) with the reason where this build or machine has none.
Backend& backend();

// What tilemoe_set_cuda_arch() and tilemoe_cuda_arch() do.
void set_arch(const char* name);
std::string describe_arch();

// Throws Error(kUnsupported), with the tensor and the limit, if a call's arguments exceed a limit of
// the CUDA kernels.
void check_call_limits(const LayerTensors& tensors);

}  // namespace tilemoe::cuda
