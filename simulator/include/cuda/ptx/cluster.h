// Simulated: blocks of a cluster (src/cuda/ptx/cluster.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void cluster_sync() {
  simulator::sync_cluster();
}
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  return simulator::address_in_cluster(shared, rank);
}

}  // namespace tilemoe::cuda::ptx
