// bfloat16, with a kernel for plain SwiGLU beside what every type has.
#include "cuda/step/steps.h"
#include "cuda/step/up_projection.h"

namespace tilemoe::cuda {

template void up_projection<__nv_bfloat16>(const UpProjection&);

// One tile. Ping-pong with 128x192 and 128x128 was 13 and 40 % slower on 7b-n256, 3 and 43 % on
// qwen3-235b: the smaller tiles load more for each product than the hidden epilogue saves.
void up_projection_swiglu(const UpProjection& step) {
  run_up_projection<AnyTile<__nv_bfloat16>, Activations::kSwiGLU, Major::kSum>(step);
}

}  // namespace tilemoe::cuda
