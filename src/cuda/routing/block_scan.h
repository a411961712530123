// Scans over the threads of a block, for numbers whose order of combination does not matter.
#pragma once

#include <cstdint>

#include "cuda/routing/warp_choice.h"

namespace tilemoe::cuda {

struct Add {
  template <class Number>
  __device__ __forceinline__ static Number combine(Number a, Number b) {
    return a + b;
  }
};
struct Max {
  template <class Number>
  __device__ __forceinline__ static Number combine(Number a, Number b) {
    return a > b ? a : b;
  }
};

template <class Number, class Operation, int kThreads>
class BlockScan {
 public:
  static constexpr int kWarps = kThreads / kWarp;
  static_assert(kThreads % kWarp == 0 && kWarps <= kWarp);

  struct Shared {
    Number warp_total[kWarps];
  };
  struct Result {
    Number inclusive;  // of this thread
    Number total;      // of the block
  };

  // Called by all threads. Ends with a barrier, so the next call may follow at once.
  __device__ static Result scan(Shared& shared, Number value) {
    const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarp;
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const Number before = __shfl_up_sync(kAllLanes, value, distance);
      if (lane >= distance) value = Operation::combine(before, value);
    }
    if (lane == kWarp - 1) shared.warp_total[warp] = value;
    __syncthreads();
    Number total = shared.warp_total[0], inclusive = value;
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      if (w > 0) total = Operation::combine(total, shared.warp_total[w]);
      if (w < warp) inclusive = Operation::combine(shared.warp_total[w], inclusive);
    }
    __syncthreads();
    return {inclusive, total};
  }
};

}  // namespace tilemoe::cuda
