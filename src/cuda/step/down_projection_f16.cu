#include "cuda/step/down_projection.h"

namespace tilemoe::cuda {

template void down_projection<__half>(const DownProjection&);

}  // namespace tilemoe::cuda
