// The operators on the current GPU: GEMMs by cuBLASLt, the rest by short kernels
// (kernels.h), all in float32. The experts compute in bfloat16.
#pragma once

#include <memory>

#include "train/operators.h"

namespace tilemoe::train {

// Throws std::runtime_error in a build without the CUDA backend.
std::unique_ptr<Operators> make_device_operators();

}  // namespace tilemoe::train
