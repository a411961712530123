#include "cuda/step/weight_gradient.h"

namespace tilemoe::cuda {

template void weight_gradient<__nv_bfloat16, 192>(const WeightGradientProduct&);

}  // namespace tilemoe::cuda
