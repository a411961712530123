// The CUDA backend: Hopper GPUs (H100, H200).
#pragma once

#include "../backend.h"  // "backend.h" would find this file itself

namespace tilemoe::cuda {

// The backend, or Error(kUnsupported) with the reason where this build or machine has none.
Backend& backend();

}  // namespace tilemoe::cuda
