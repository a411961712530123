// Blocks of a cluster: they run side by side and reach each other's shared memory.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Until every thread of the cluster that has not exited is here.
__device__ __forceinline__ void cluster_sync() {
  asm volatile(
      "barrier.cluster.arrive.release.aligned;\n"
      "barrier.cluster.wait.acquire.aligned;" ::
          : "memory");
}

// Where block `rank` of the cluster has what lies at `shared` here.
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  uint32_t address;
  asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(shared), "r"(rank));
  return address;
}

}  // namespace tilemoe::cuda::ptx
