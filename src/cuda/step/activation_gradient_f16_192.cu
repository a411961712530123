#include "cuda/step/activation_gradient.h"

namespace tilemoe::cuda {

template void activation_gradient<__half, 192>(const ActivationGradient&);

}  // namespace tilemoe::cuda
