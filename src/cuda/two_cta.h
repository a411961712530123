// Whether kernels use 2-CTA MMA, if the arch has such kernels.
#pragma once

namespace tilemoe::cuda::sm100 {

// By the value of TILEMOE_2CTA, which may be null: 1 selects it. No GPU has run these kernels, so they
// are off by default. Throws Error(kInvalidArgument) for another value than 0 or 1.
bool requests_2cta(const char* variable);

}  // namespace tilemoe::cuda::sm100
