#include "cuda/step/up_projection.h"

namespace tilemoe::cuda {

template void up_projection<__nv_bfloat16>(const UpProjection&);

}  // namespace tilemoe::cuda
