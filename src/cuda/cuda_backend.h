// The CUDA backend: routing and the router on GPUs from compute capability 8.0 on, the layer on
// GPUs that an arch of this build runs on (cuda/arch.h).
#pragma once

#include "core/backend.h"

namespace tilemoe::cuda {

// The backend. Throws Error(kUnsupported) with the reason if this build or machine has none.
const Backend& backend();
// The same whether or not this machine has a device.
const Backend& backend_of_build();

// The implementation of tilemoe_set_cuda_arch() and tilemoe_cuda_arch().
void set_arch(const char* name);
std::string describe_arch();

// Throws Error(kUnsupported), with the tensor and the limit, if a call's arguments exceed a limit of
// the CUDA kernels.
void check_call_limits(const LayerTensors& tensors);

}  // namespace tilemoe::cuda
