#include "cuda/step/input_gradient.h"

namespace tilemoe::cuda {

template void input_gradient<__nv_bfloat16>(const InputGradient&);

}  // namespace tilemoe::cuda
