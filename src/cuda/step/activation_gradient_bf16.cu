// bfloat16, with a kernel for plain SwiGLU beside what every type has.
#include "cuda/step/activation_gradient.h"

namespace tilemoe::cuda {

template void activation_gradient<__nv_bfloat16>(const ActivationGradient&);

void activation_gradient_swiglu(const ActivationGradient& step) {
  run_activation_gradient<ActivationGradientTile<__nv_bfloat16>, Activations::kSwiGLU,
                          Major::kRows>(step);
}

}  // namespace tilemoe::cuda
