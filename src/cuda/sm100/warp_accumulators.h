// A storing warp's rows of a tile in tensor memory, which an epilogue pulls into registers some
// columns at a time: a whole tile has no room there.
#pragma once

#include <cstdint>

#include "cuda/core/slab.h"
#include "cuda/ptx/pin.h"
#include "cuda/ptx/tensor_memory.h"

namespace tilemoe::cuda::sm100 {

constexpr uint32_t kLane = 1u << 16;  // in addresses of tensor memory

// Columns that an epilogue has in registers at a time: a group of ds.
constexpr int kBatchColumns = 64;

// A batch of columns of one of a warp's slabs.
using Batch = Slabs<1, kBatchColumns>;

class WarpAccumulators {
 public:
  // `address` of the warp's first lane and the tile's first column.
  __device__ explicit WarpAccumulators(uint32_t address) : address_(address) {}

  // Begins to bring kColumns columns of slab m, from `column` on. All lanes of the warp call it, and
  // land() before the numbers are used.
  template <int kColumns>
  __device__ __forceinline__ void pull(int m, int32_t column, float* numbers) const {
    static_assert(kColumns % kLoad == 0);
#pragma unroll
    for (int c = 0; c < kColumns; c += kLoad)
      ptx::tensor_memory_load_16x32(numbers + c / 2,
                                    address_ + m * slab::kRows * kLane + column + c);
  }
  // Waits for what was pulled into these slabs, and keeps uses of them behind that.
  template <int kSlabs, int kNumbers>
  __device__ __forceinline__ static void land(float (&slabs)[kSlabs][kNumbers]) {
    ptx::tensor_memory_wait_loads();
#pragma unroll
    for (auto& slab : slabs)
#pragma unroll
      for (float& number : slab) ptx::pin(number);
  }

  // Columns of slab m from `column` on, as many as a batch has.
  __device__ __forceinline__ void read(int m, int32_t column, Batch& batch) const {
    pull<kBatchColumns>(m, column, batch[0]);
    land(batch);
  }

 private:
  static constexpr int kLoad = 32;  // columns of an instruction

  uint32_t address_;
};

}  // namespace tilemoe::cuda::sm100
