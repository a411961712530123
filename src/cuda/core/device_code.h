// Whether this machine's devices run what a build has, and what to say where they do not. Host code
// alone: kernels include device.h.
#pragma once

#include <string>
#include <string_view>

#include "cuda/core/device.h"

namespace tilemoe::cuda {

// Whether code for these architectures, "80,90a" as in TILEMOE_CUDA_ARCHS, runs on the device.
bool has_code(std::string_view archs, const DeviceInfo& device);
// Throws Error(kUnsupported) where it does not.
void require_code(std::string_view archs, const DeviceInfo& device);

// What to say where asking for the devices gave `found`, with a driver of that version (as
// cudaDriverGetVersion has it: 12040; 0 where there is none).
std::string why_no_device(cudaError_t found, int driver);

}  // namespace tilemoe::cuda
