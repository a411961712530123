#include "cuda/step/input_gradient.h"

namespace tilemoe::cuda {

template void input_gradient<__half>(const InputGradient&);

}  // namespace tilemoe::cuda
