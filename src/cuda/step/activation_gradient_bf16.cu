// bfloat16, with kernels for plain SwiGLU beside what every type has.
#include "cuda/step/activation_gradient.h"
#include "cuda/step/projection_tiles.h"

namespace tilemoe::cuda {

template void activation_gradient<__nv_bfloat16>(const ActivationGradient&);

template <class Shape>
void run_swiglu_gradient(const ActivationGradient& step) {
  run_activation_gradient<Shape, Activations::kSwiGLU, Major::kRows>(step);
}

void activation_gradient_swiglu(const ActivationGradient& step) {
  if (tile_of(step) == kCooperative256Pairs)
    run_swiglu_gradient<ActivationGradientTile<__nv_bfloat16, 2>>(step);
  else
    run_swiglu_gradient<ActivationGradientTile<__nv_bfloat16>>(step);
}

}  // namespace tilemoe::cuda
