// The steps of the routing that have kernels, as the backend calls them.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

void top_k(const tilemoe_top_k_args& args);

}  // namespace tilemoe::cuda
