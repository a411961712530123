// What the doctor's verdicts are about on this machine, and the one on a device.
#pragma once

#include <string>

#include "cuda/core/device.h"
#include "cuda/verdict.h"

namespace tilemoe::cuda {

// Of this library's kernels, the driver that is loaded and the device's kind.
VerdictKey verdict_key(const DeviceInfo& device, const std::string& kit);

// The verdict on the kit sm100, read once a device: who runs the doctor starts the program again.
const FoundVerdict& verdict_of(const DeviceInfo& device);

}  // namespace tilemoe::cuda
