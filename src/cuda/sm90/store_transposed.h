// D^T in 16 bits: a consumer's 64 rows become 128 contiguous bytes of the output's rows, which are
// D's columns.
#pragma once

#include <cuda.h>

#include <cstdint>

#include "cuda/core/operand.h"
#include "cuda/core/pack.h"
#include "cuda/ptx/named_barrier.h"
#include "cuda/ptx/proxy_fence.h"
#include "cuda/ptx/stmatrix.h"
#include "cuda/ptx/tma.h"
#include "cuda/sm90/named_barriers.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

// Batches of columns go through two slots of shared memory in turn: all four warps write one,
// transposed, and TMA takes it from there while the other is written.
template <class Shape>
class TransposedStore {
 public:
  using Element = typename Shape::Out;
  static constexpr int kBatchColumns = 64;
  static constexpr int kRowBytes = 64 * static_cast<int>(sizeof(Element));
  static constexpr int kSlotBytes = kBatchColumns * kRowBytes;
  static constexpr int kSlots = 2;
  static constexpr int kSharedBytes = kSlots * kSlotBytes;  // of a consumer
  static_assert(Shape::kSlabs == 1 && kRowBytes == 128, "a swizzled row of the consumer's rows");

  __device__ TransposedStore(uint32_t shared, int32_t thread) : shared_(shared) {
    // Lane l gives row l % 8 of one of four 8x8 blocks: columns of D left and right, rows of D
    // upper and lower.
    const uint32_t lane = thread % kWarp, warp = thread / kWarp;
    lane_offset_ =
        (lane / 16 * 8 + lane % 8) * kRowBytes + swizzled_chunk(lane % 8, warp * 2 + lane / 8 % 2);
  }

  // kBatchColumns columns of D, of which words[j][half] has accumulators 4 j + 2 half and the next,
  // to rows from `out_row` on and columns from `out_column` on of the output's part `part`. The map
  // has boxes of (kBatchColumns, 1, 64) and clips what is not there. All of the consumer call it.
  __device__ __forceinline__ void store_packed(const CUtensorMap& out, int32_t out_column,
                                               int32_t part, int32_t out_row,
                                               const uint32_t (*words)[2]) {
    const uint32_t slot = shared_ + next_slot_ * kSlotBytes;
    next_slot_ = (next_slot_ + 1) % kSlots;
    const bool sends = threadIdx.x % kWarpgroup == 0;
    if (sends) ptx::tma_store_wait_read<kSlots - 1>();
    sync();  // nobody reads the slot any more
#pragma unroll
    for (int j = 0; j < kBatchColumns / 8; j += 2)
      ptx::stmatrix_x4_transposed(slot + lane_offset_ + j * 8 * kRowBytes, words[j][0], words[j][1],
                                  words[j + 1][0], words[j + 1][1]);
    ptx::fence_proxy_async();
    sync();
    if (sends) {
      ptx::tma_store(&out, slot, out_column, part, out_row);
      ptx::tma_store_commit();
    }
  }

  __device__ void finish() const {
    if (threadIdx.x % kWarpgroup == 0) ptx::tma_store_wait();
  }

 private:
  __device__ static void sync() {
    const auto consumer = static_cast<int32_t>(threadIdx.x / kWarpgroup) - 1;
    ptx::barrier_sync(number_of(NamedBarrier::kStore0, consumer), kWarpgroup);
  }

  uint32_t shared_;       // this consumer's slots
  uint32_t lane_offset_;  // of the row that this lane gives, in a slot
  int32_t next_slot_ = 0;
};

}  // namespace tilemoe::cuda::sm90
