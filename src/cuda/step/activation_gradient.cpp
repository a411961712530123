#include <cuda_bf16.h>
#include <cuda_fp16.h>

#include "cuda/step/projection_tiles.h"
#include "cuda/step/steps.h"

namespace tilemoe::cuda {

template <class Element>
void activation_gradient(const ActivationGradient& step) {
  if (tile_of(step) == kCooperative192Cluster)
    activation_gradient<Element, 192>(step);
  else
    activation_gradient<Element, 256>(step);
}

template void activation_gradient<__half>(const ActivationGradient&);
template void activation_gradient<__nv_bfloat16>(const ActivationGradient&);

}  // namespace tilemoe::cuda
