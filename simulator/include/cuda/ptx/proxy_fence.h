// Simulated: ordinary accesses before those of the async proxy (src/cuda/ptx/proxy_fence.h).
#pragma once

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void fence_proxy_async() {
  simulator::fence_proxy();
}

}  // namespace tilemoe::cuda::ptx
