#include "cuda/step/up_projection.h"

namespace tilemoe::cuda {

template void up_projection<__half>(const UpProjection&);

}  // namespace tilemoe::cuda
