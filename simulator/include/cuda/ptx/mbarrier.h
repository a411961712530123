// Simulated: barriers in shared memory (src/cuda/ptx/mbarrier.h).
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

}  // namespace tilemoe::cuda::ptx
