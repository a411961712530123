// Tensor memory: 128 lanes of 512 columns of 32 bits, a multiprocessor's. An address has the lane
// in its upper 16 bits, the column in its lower. Of a block's warps, number w reaches the 32 lanes
// from 32 (w % 4) on.
#pragma once

#include <cstdint>

namespace tilemoe::cuda::ptx {

// Waits until there are kColumns columns, and writes the address of the first to shared memory. All
// lanes of a warp call it; the same warp frees them. Of a pair of blocks (tcgen05.h) both, by warps
// of the same number, call all three, and wait for each other in each; they get the same columns.
template <uint32_t kColumns, int kBlocks>
__device__ __forceinline__ void tensor_memory_allocate(uint32_t shared) {
  static_assert(kColumns >= 32 && kColumns <= 512 && (kColumns & (kColumns - 1)) == 0);
  asm volatile("tcgen05.alloc.cta_group::%2.sync.aligned.shared::cta.b32 [%0], %1;" ::"r"(shared),
               "n"(kColumns), "n"(kBlocks)
               : "memory");
}

// This block allocates no more, so that another may.
template <int kBlocks>
__device__ __forceinline__ void tensor_memory_relinquish() {
  asm volatile("tcgen05.relinquish_alloc_permit.cta_group::%0.sync.aligned;" ::"n"(kBlocks)
               : "memory");
}

// Before the block ends, by the warp that allocated.
template <uint32_t kColumns, int kBlocks>
__device__ __forceinline__ void tensor_memory_free(uint32_t address) {
  asm volatile("tcgen05.dealloc.cta_group::%2.sync.aligned.b32 %0, %1;" ::"r"(address),
               "n"(kColumns), "n"(kBlocks)
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
