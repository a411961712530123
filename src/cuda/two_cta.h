// Whether blocks multiply in pairs, where the kit has kernels of it.
#pragma once

namespace tilemoe::cuda::sm100 {

// TILEMOE_2CTA=1 asks for it. No GPU has run them, so that nobody else does.
bool pairs_asked_for();

}  // namespace tilemoe::cuda::sm100
