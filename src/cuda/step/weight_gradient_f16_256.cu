#include "cuda/step/weight_gradient.h"

namespace tilemoe::cuda {

template void weight_gradient<__half, 256>(const WeightGradientProduct&);

}  // namespace tilemoe::cuda
