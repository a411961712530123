#include "cuda/step/weight_gradient.h"

namespace tilemoe::cuda {

template void weight_gradient<__half>(const WeightGradientProduct&);

}  // namespace tilemoe::cuda
