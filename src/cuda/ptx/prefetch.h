// Asks for the cache line of an address to be brought to L2. Nothing is read: what others write to
// it meanwhile arrives there too, so it may come before any wait for them.
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void prefetch_to_l2(const void* global) {
  asm volatile("prefetch.global.L2 [%0];" ::"l"(global));
}

}  // namespace tilemoe::cuda::ptx
