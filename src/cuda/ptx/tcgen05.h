// Matrix products by tcgen05.mma, from shared memory to tensor memory, of one block or of a pair:
// one thread starts them and they run by themselves, in the order in which they were started.
//
// A pair is blocks 2 i and 2 i + 1 of a cluster. Of its product each block has half of A's rows, of
// B's and of D's, at the same addresses as the other. All instructions of a kernel are of one
// block, or all of a pair. The other block must not have ended.
#pragma once

#include <cstdint>

#include "cuda/ptx/tcgen05_descriptors.h"

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
template <int kBlocks>
__device__ __forceinline__ void tcgen05_mma_f16(uint32_t d, uint64_t a, uint64_t b,
                                                uint32_t instruction, uint32_t accumulate) {
  asm volatile(
      "{\n"
      ".reg .pred p;\n"
      "setp.ne.b32 p, %4, 0;\n"
      "tcgen05.mma.cta_group::%5.kind::f16 [%0], %1, %2, %3, p;\n"
      "}" ::"r"(d),
      "l"(a), "l"(b), "r"(instruction), "r"(accumulate), "n"(kBlocks)
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
__device__ __forceinline__ void tcgen05_commit_pair(uint32_t barrier, uint16_t blocks) {
  asm volatile(
      "tcgen05.commit.cta_group::2.mbarrier::arrive::one.shared::cluster.multicast::cluster.b64"
      " [%0], %1;" ::"r"(barrier),
      "h"(blocks)
      : "memory");
}

}  // namespace tilemoe::cuda::ptx
