// Orders ordinary accesses of shared memory before later ones of the tensor cores and the copy
// engine: by the writing thread before the barrier that hands its data over, or by the thread that
// passed that barrier, before it starts the product that reads the data.
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

}  // namespace tilemoe::cuda::ptx
