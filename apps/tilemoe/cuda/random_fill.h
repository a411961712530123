// Random contents for buffers on a GPU.
#pragma once

#include "cuda/device.h"

namespace tilemoe::app {

// scale * N(0, 1): one random block of a prime number of elements, over and over.
void fill_normal(DeviceBuffer& buffer, DType dtype, double scale, uint64_t seed);

}  // namespace tilemoe::app
