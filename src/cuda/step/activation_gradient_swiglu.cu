// Plain SwiGLU in bfloat16.
#include "cuda/step/activation_gradient.h"
#include "cuda/step/projection_tiles.h"

namespace tilemoe::cuda {

template <class Shape>
void run_swiglu_gradient(const ActivationGradient& step) {
  run_activation_gradient<Shape, Activations::kSwiGLU, Major::kMN>(step);
}

void activation_gradient_swiglu(const ActivationGradient& step) {
  const TileConfiguration tile = tile_of(step);
  if (tile == kCooperative192Cluster)
    run_swiglu_gradient<ActivationGradientTile<__nv_bfloat16, 192, 2>>(step);
  else if (tile == kCooperative256Cluster)
    run_swiglu_gradient<ActivationGradientTile<__nv_bfloat16, 256, 2>>(step);
  else
    run_swiglu_gradient<ActivationGradientTile<__nv_bfloat16, 256>>(step);
}

}  // namespace tilemoe::cuda
