#include "cuda/step/activation_gradient.h"

namespace tilemoe::cuda {

template void activation_gradient<__nv_bfloat16, 256>(const ActivationGradient&);

}  // namespace tilemoe::cuda
