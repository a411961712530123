// Simulated: 16-byte copies from global to shared memory (src/cuda/ptx/cp_async.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, uint32_t bytes) {
  simulator::copy_async(shared, source, bytes);
}
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  simulator::arrive_copies(barrier);
}

}  // namespace tilemoe::cuda::ptx
