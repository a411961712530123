// Simulated: barriers and fences (src/cuda/ptx/barriers.h).
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  simulator::init_mbarrier(barrier, arrivals);
}
__device__ __forceinline__ void fence_mbarrier_init() {
  simulator::fence_proxy();
}
__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  simulator::arrive_mbarrier(barrier, 0);
}
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  simulator::arrive_mbarrier(barrier, 0);
}
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t barrier) {
  simulator::arrive_mbarrier(barrier, 0);
}
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
  simulator::arrive_mbarrier(barrier, bytes);
}
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  return simulator::test_mbarrier(barrier, parity);
}
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  return simulator::test_mbarrier(barrier, parity);
}
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
  simulator::wait_mbarrier(barrier, parity);
}

__device__ __forceinline__ void mbarrier_wait_acquire_cluster(uint32_t barrier, uint32_t parity) {
  simulator::wait_mbarrier(barrier, parity);
}

// The sixteen named barriers of a CTA.

__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
  simulator::named_barrier(barrier, threads, true);
}
__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t threads) {
  simulator::named_barrier(barrier, threads, false);
}

// Orders ordinary accesses before those of the async proxy.

__device__ __forceinline__ void fence_proxy_async() {
  simulator::fence_proxy();
}

// The CTAs of a cluster.

__device__ __forceinline__ void cluster_sync() {
  simulator::sync_cluster();
}
__device__ __forceinline__ uint32_t cluster_address(uint32_t shared, uint32_t rank) {
  return simulator::address_in_cluster(shared, rank);
}

}  // namespace tilemoe::cuda::ptx
