// Simulated: the thread's number in its block (src/cuda/ptx/thread_index.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ int32_t thread_index() {
  return simulator::thread_number();
}

}  // namespace tilemoe::cuda::ptx
