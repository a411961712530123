// Whether kernels use 2-CTA MMA, if the arch has such kernels.
#pragma once

namespace tilemoe::cuda::sm100 {

// TILEMOE_2CTA=1 selects it. No GPU has run these kernels, so they are off by default.
bool requests_2cta();

}  // namespace tilemoe::cuda::sm100
