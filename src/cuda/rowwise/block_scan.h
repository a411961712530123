// Scans over the threads of a block, for numbers whose order of combination does not matter.
#pragma once

#include <cstdint>

#include "cuda/rowwise/warp_choice.h"

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
    value = scan_lanes(value);
    if (lane == kWarp - 1) shared.warp_total[warp] = value;
    __syncthreads();
    // Lanes past the last warp repeat it; nobody asks them.
    const Number through = scan_lanes(shared.warp_total[min(lane, kWarps - 1)]);
    const Number total = __shfl_sync(kAllLanes, through, kWarps - 1);
    const Number before = __shfl_sync(kAllLanes, through, max(warp - 1, 0));
    __syncthreads();
    return {warp > 0 ? Operation::combine(before, value) : value, total};
  }

 private:
  __device__ __forceinline__ static Number scan_lanes(Number value) {
#pragma unroll
    for (int distance = 1; distance < kWarp; distance *= 2) {
      const Number before = __shfl_up_sync(kAllLanes, value, distance);
      if (lane_index() >= distance) value = Operation::combine(before, value);
    }
    return value;
  }
};

}  // namespace tilemoe::cuda
