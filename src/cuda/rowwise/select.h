// The greatest of many numbers without sorting them: a radix descent, some bits at a time.
#pragma once

#include <cstdint>

#include "cuda/rowwise/block_scan.h"

namespace tilemoe::cuda {

// The first `wanted` in descending order are those above `value`, and `ties` of those equal to it.
struct Threshold {
  uint32_t value;
  int32_t ties;
};

// Bits of a digit where a block selects, and so its threads: 1024 where few blocks have much to do,
// 256 where many have little. By reasoning: groups of tokens were not measured yet.
constexpr int kMuchBits = 10, kLittleBits = 8;

// By a block of kThreads, one for every bin of a digit.
template <int kBits>
class BlockSelect {
 public:
  static constexpr int kThreads = 1 << kBits;
  using Scan = BlockScan<int32_t, Add, kThreads>;

  struct Shared {
    typename Scan::Shared scan;
    int32_t bins[kThreads];
    int32_t bin, above;  // the digit of the threshold; how many have a greater one
  };

  // each(visit) calls visit(x) for this thread's share of the numbers, the same on every call;
  // x < 2^bits. 1 <= wanted <= their count.
  template <class Each>
  __device__ static Threshold select(Shared& shared, int32_t wanted, int bits, const Each& each) {
    uint32_t prefix = 0;
    for (int shift = (bits - 1) / kBits * kBits; shift >= 0; shift -= kBits) {
      shared.bins[threadIdx.x] = 0;
      __syncthreads();
      each([&](uint32_t x) {
        // A shift by 32 is no shift: at the top digit nothing is above it.
        if (shift + kBits < 32 && x >> (shift + kBits) != prefix) return;
        atomicAdd(&shared.bins[(x >> shift) % kThreads], 1);
      });
      __syncthreads();
      // Bins in descending order.
      const auto bin = static_cast<int32_t>(kThreads - 1 - threadIdx.x);
      const int32_t here = shared.bins[bin];
      const int32_t through = Scan::scan(shared.scan, here).inclusive;
      if (through >= wanted && through - here < wanted) {
        shared.bin = bin;
        shared.above = through - here;
      }
      __syncthreads();
      prefix = prefix << kBits | static_cast<uint32_t>(shared.bin);
      wanted -= shared.above;
    }
    return {prefix, wanted};
  }
};

}  // namespace tilemoe::cuda
