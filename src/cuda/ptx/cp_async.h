// 16-byte copies from global to shared memory, one a thread.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Copies the first `bytes` (0 or 16) and fills the rest with zeros; `source` is not read where
// `bytes` is 0. Bypasses L1.
__device__ __forceinline__ void cp_async_16(uint32_t shared, const void* source, uint32_t bytes) {
  asm volatile("cp.async.cg.shared.global.L2::128B [%0], [%1], 16, %2;" ::"r"(shared), "l"(source),
               "r"(bytes)
               : "memory");
}

// One of the barrier's expected arrivals, made when all copies that this thread has started so far
// have landed.
__device__ __forceinline__ void cp_async_arrive(uint32_t barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" ::"r"(barrier) : "memory");
}

}  // namespace tilemoe::cuda::ptx
