// Simulated: the transpose of an 8x8 block in a warp's registers (src/cuda/ptx/movmatrix.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ uint32_t movmatrix(uint32_t word) {
  return simulator::move_matrix(word);
}

}  // namespace tilemoe::cuda::ptx
