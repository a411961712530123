// Simulated: one lane of a warp (src/cuda/ptx/elect.h).
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ bool elect_one() {
  return simulator::elect_one_lane();
}

}  // namespace tilemoe::cuda::ptx
