// Matrix products by tcgen05.mma, from shared memory to tensor memory, of one block or of a pair:
// one thread starts them and they run by themselves, in the order in which they were started.
//
// A pair is blocks 2 i and 2 i + 1 of a cluster. Of its product each block has half of A's rows, of
// B's and of D's, at the same addresses as the other. All instructions of a kernel are of one
// block, or all of a pair. The other block must not have ended.
#pragma once

#include <cstdint>

#include "cuda/ptx/descriptors.h"

namespace tilemoe::cuda::ptx {

// Around what hands data from one thread to another, of barriers and mbarriers alike: by the thread
// that ran or started tcgen05 instructions before it tells, and by the other when it was told.
__device__ __forceinline__ void tcgen05_fence_before_sync() {
  asm volatile("tcgen05.fence::before_thread_sync;" ::: "memory");
}
__device__ __forceinline__ void tcgen05_fence_after_sync() {
  asm volatile("tcgen05.fence::after_thread_sync;" ::: "memory");
}

// D += A B^T of 16 steps of the sum; `accumulate` 0 overwrites D. D is an address in tensor memory,
// `instruction` and the operands are words of tcgen05_descriptors.h. By one thread.
template <int kCtas>
__device__ __forceinline__ void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b,
                                                uint32_t instruction, uint32_t accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(accumulate), "n"(kCtas)
      : "memory");
}

// One arrival at the barrier when all products that this thread has started so far are done, and
// read their operands no more. Fences before the arrival by itself.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

// The same of a pair's products, at the same place in every block of the cluster whose bit is set
// in `blocks`.
__device__ __forceinline__ void tcgen05_commit_2cta(uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
      " [%0], %1;" ::"r"(barrier),
      "h"(blocks)
      : "memory");
}

// Tensor memory: 128 lanes of 512 columns of 32 bits, an SM's. An address has the lane
// in its upper 16 bits, the column in its lower. Of a block's warps, number w reaches the 32 lanes
// from 32 (w % 4) on.

// Waits until there are kColumns columns, and writes the address of the first to shared memory. All
// lanes of a warp call it; the same warp frees them. Of a pair of blocks (tcgen05.h) both, by warps
// of the same number, call all three, and wait for each other in each; they get the same columns.
template <uint32_t kColumns, int kCtas>
__device__ __forceinline__ void tensor_memory_allocate(uint32_t shared) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared),
               "n"(kColumns), "n"(kCtas)
               : "memory");
}

// This block allocates no more, so that another may.
template <int kCtas>
__device__ __forceinline__ void tensor_memory_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas)
               : "memory");
}

// Before the block ends, by the warp that allocated.
template <uint32_t kColumns, int kCtas>
__device__ __forceinline__ void tensor_memory_free(uint32_t address) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address),
               "n"(kColumns), "n"(kCtas)
               : "memory");
}

// 16 lanes by 32 columns, from `address` on, which is the first or the seventeenth of the warp's
// lanes. Number 4 j + i of a warp's lane l is lane l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i % 2.
// All lanes of a warp call it; the numbers are there after tensor_memory_wait_loads().
__device__ __forceinline__ void tensor_memory_load_16x32(float* d, uint32_t address) {
  asm volatile(
      "tcgen05.ld.sync.aligned.16x256b.x4.b32 {%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, "
      "%12, %13, %14, %15}, [%16];"
      : "=f"(d[0]), "=f"(d[1]), "=f"(d[2]), "=f"(d[3]), "=f"(d[4]), "=f"(d[5]), "=f"(d[6]),
        "=f"(d[7]), "=f"(d[8]), "=f"(d[9]), "=f"(d[10]), "=f"(d[11]), "=f"(d[12]), "=f"(d[13]),
        "=f"(d[14]), "=f"(d[15])
      : "r"(address)
      : "memory");
}

// Until this thread's loads are complete.
__device__ __forceinline__ void tensor_memory_wait_loads() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

}  // namespace tilemoe::cuda::ptx
