// tcgen05: MMAs from shared memory to tensor memory, of one CTA or of a CTA pair, and tensor
// memory. One thread issues the MMAs; they run asynchronously, in the order in which they were
// issued.
//
// A CTA pair is CTAs 2 i and 2 i + 1 of a cluster. Each CTA has half of the rows of A, B and D of a
// 2-CTA MMA, at the same addresses as the other. Either all instructions of a kernel are of one
// CTA, or all are of a CTA pair. The other CTA must not have ended.
#pragma once

#include <cstdint>

#include "cuda/ptx/descriptors.h"

namespace tilemoe::cuda::ptx {

// Fences around a barrier or an mbarrier that passes data from one thread to another: the thread
// that ran or issued tcgen05 instructions calls the first before it arrives, the other thread calls
// the second after its wait.
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

// Arrives at the barrier once when all MMAs that this thread has issued are done and no longer read
// their operands. It contains the fence before the arrival.
__device__ __forceinline__ void tcgen05_commit(uint32_t barrier) {
  asm volatile(
      "tcgen05.commit.cta_group::1.mbarrier::arrive::one.shared::cluster.b64 [%0];" ::"r"(barrier)
      : "memory");
}

// The same for the MMAs of a CTA pair, at the same address in every CTA of the cluster whose bit is
// set in `blocks`.
__device__ __forceinline__ void tcgen05_commit_2cta(uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
      " [%0], %1;" ::"r"(barrier),
      "h"(blocks)
      : "memory");
}

// Tensor memory of an SM: 128 lanes of 512 columns of 32 bits. An address has the lane in its upper
// 16 bits and the column in its lower 16. Warp w of a CTA can access the 32 lanes from 32 (w % 4)
// on.

// Waits until kColumns columns are free, and writes the address of the first to shared memory. All
// lanes of a warp call it; the same warp frees them. Both CTAs of a CTA pair call all three
// functions, by warps of the same number, and wait for each other in each; they get the same
// columns.
template <uint32_t kColumns, int kCtas>
__device__ __forceinline__ void tensor_memory_allocate(uint32_t shared) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared),
               "n"(kColumns), "n"(kCtas)
               : "memory");
}

// This CTA allocates no more, so that another CTA may.
template <int kCtas>
__device__ __forceinline__ void tensor_memory_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kCtas)
               : "memory");
}

// Called before the CTA ends, by the warp that allocated.
template <uint32_t kColumns, int kCtas>
__device__ __forceinline__ void tensor_memory_free(uint32_t address) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address),
               "n"(kColumns), "n"(kCtas)
               : "memory");
}

// 16 lanes by 32 columns, from `address` on, which is the first or the seventeenth of the warp's
// lanes. Number 4 j + i of a warp's lane l is lane l / 4 + 8 (i / 2), column 8 j + 2 (l % 4) + i %
// 2. All lanes of a warp call it; the numbers are valid after tensor_memory_wait_loads().
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

// Waits until the loads of this thread are complete.
__device__ __forceinline__ void tensor_memory_wait_loads() {
  asm volatile("tcgen05.wait::ld.sync.aligned;" ::: "memory");
}

}  // namespace tilemoe::cuda::ptx
