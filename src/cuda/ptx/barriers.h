// Barriers in shared memory that count arrivals and bytes. A barrier is named by its shared
// address.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

__device__ __forceinline__ void mbarrier_init(uint32_t barrier, uint32_t arrivals) {
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

// Makes initialised barriers visible to TMA.
__device__ __forceinline__ void fence_mbarrier_init() {
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
}

__device__ __forceinline__ void mbarrier_arrive(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// At a barrier of any block of the cluster, by its cluster address. Orders nothing but the block's
// own accesses: a release for the whole cluster is a memory barrier, which took half of the time
// of a product again.
__device__ __forceinline__ void mbarrier_arrive_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.shared::cluster.b64 _, [%0];" ::"r"(barrier) : "memory");
}

// The same, and hands on what this block's threads wrote or were told of.
__device__ __forceinline__ void mbarrier_arrive_release_cluster(uint32_t barrier) {
  asm volatile("mbarrier.arrive.release.cluster.shared::cluster.b64 _, [%0];" ::"r"(barrier)
               : "memory");
}

// Arrives once and adds `bytes` to what TMA must deliver before the phase ends.
__device__ __forceinline__ void mbarrier_arrive_expect_bytes(uint32_t barrier, uint32_t bytes) {
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes)
               : "memory");
}

// Whether the phase of this parity has ended.
__device__ __forceinline__ bool mbarrier_test_wait(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.test_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// The same; waits a while for it in hardware, from compute capability 9.0 on.
__device__ __forceinline__ bool mbarrier_try_wait(uint32_t barrier, uint32_t parity) {
  uint32_t ended;
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "mbarrier.try_wait.parity.shared::cta.b64 p, [%1], %2;\n"
      "selp.u32 %0, 1, 0, p;\n"
      "}"
      : "=r"(ended)
      : "r"(barrier), "r"(parity)
      : "memory");
  return ended != 0;
}

// Waits for the end of the phase of this parity.
__device__ __forceinline__ void mbarrier_wait(uint32_t barrier, uint32_t parity) {
#if __CUDA_ARCH__ >= 900
  while (!mbarrier_try_wait(barrier, parity)) {
  }
#else
  while (!mbarrier_test_wait(barrier, parity)) {
  }
#endif
}

// The same, where other blocks of the cluster release: from compute capability 9.0 on.
__device__ __forceinline__ void mbarrier_wait_acquire_cluster(uint32_t barrier, uint32_t parity) {
  uint32_t ended = 0;
  while (ended == 0)
    asm volatile(
        "{\n"
        ".reg .pred p;\n"
        "mbarrier.try_wait.parity.acquire.cluster.shared::cta.b64 p, [%1], %2;\n"
        "selp.u32 %0, 1, 0, p;\n"
        "}"
        : "=r"(ended)
        : "r"(barrier), "r"(parity)
        : "memory");
}

// The hardware's sixteen barriers of a block. Number 0 is __syncthreads().

// Waits until `threads` threads have arrived or waited.
__device__ __forceinline__ void barrier_sync(uint32_t barrier, uint32_t threads) {
  asm volatile("barrier.cta.sync.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

__device__ __forceinline__ void barrier_arrive(uint32_t barrier, uint32_t threads) {
  asm volatile("barrier.cta.arrive.aligned %0, %1;" ::"r"(barrier), "r"(threads) : "memory");
}

// Orders ordinary accesses of shared memory before later ones of the tensor cores and the copy
// engine: by the writing thread before the barrier that hands its data over, or by the thread that
// passed that barrier, before it starts the product that reads the data.

__device__ __forceinline__ void fence_proxy_async() {
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
}

// Blocks of a cluster: they run side by side and reach each other's shared memory.

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
