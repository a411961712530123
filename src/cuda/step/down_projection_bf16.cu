#include "cuda/step/down_projection.h"

namespace tilemoe::cuda {

template void down_projection<__nv_bfloat16>(const DownProjection&);

}  // namespace tilemoe::cuda
