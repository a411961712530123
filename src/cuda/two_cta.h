// Whether blocks multiply in pairs, where the arch has kernels of it.
#pragma once

namespace tilemoe::cuda::sm100 {

// TILEMOE_2CTA=1 asks for it. No GPU has run them, so that nobody else does.
bool requests_2cta();

}  // namespace tilemoe::cuda::sm100
