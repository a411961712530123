// Building blocks of this folder's kernels within a CTA: dynamic shared memory, the last-arriving CTA,
// scans, and the expert of a row.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

#include "cuda/core/device.h"
#include "cuda/kernels/warp_choice.h"

namespace tilemoe::cuda {

// The maximum of a CTA, dynamic and static together, that every GPU from compute capability 8.0 on
// supports: that of 8.6, 8.9 and 12.0.
constexpr int kMaxSharedBytes = 99 * 1024;

// Allows a kernel up to kBytes of dynamic shared memory; once per kernel and device.
template <auto kKernel, int kBytes>
void allow_shared_memory(const DeviceInfo& device) {
  static_assert(kBytes <= kMaxSharedBytes, "no GPU of 99 KiB could run this kernel");
  static OncePerDevice<bool> allowed;
  allowed.get(device.index, [] {
    cudaFuncAttributes attributes{};
    TILEMOE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kKernel), "a kernel's shared memory");
    const size_t all = attributes.sharedSizeBytes + kBytes;
    TILEMOE_ASSERT(all <= kMaxSharedBytes, "a row-wise kernel takes "
                                               << all << " bytes of shared memory, at most "
                                               << kMaxSharedBytes);
    TILEMOE_CHECK_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        kBytes << " bytes of shared memory for routing");
    return true;
  });
}

// Finds the last-arriving CTA of a kernel by a counter in scratch that needs no clearing: no launch
// before the kernel, and no state that outlives a call and that two streams could share.
//
// A counter has a stamp and, in its low bits, the number of CTAs that arrived. Every launch has its
// own stamp, a number that is random relative to the contents of the memory. A CTA that does not
// find the stamp writes it, with none arrived, by one compare-and-swap; if that fails, another CTA
// was first. The last CTA leaves 0, which is no stamp, since a launch in a CUDA graph has the same
// stamp on every replay. A counter is wrongly taken as open only if 48 bits of its old contents
// equal the stamp: one in 2^48 for random memory.

using Counter = unsigned long long;

class Arrivals {
 public:
  static constexpr int kCountBits = 16;
  static constexpr Counter kMaxBlocks = (Counter{1} << kCountBits) - 1;

  __device__ Arrivals(Counter* counter, Counter stamp) : counter_(counter), stamp_(stamp) {}

  // Called by thread 0 of every CTA that will arrive, some time before it does: it takes two round
  // trips to L2, which may overlap with other work.
  __device__ void open() const {
    const Counter seen = *static_cast<volatile Counter*>(counter_);
    if (seen >> kCountBits != stamp_) atomicCAS(counter_, seen, stamp_ << kCountBits);
  }

  // Called by all threads of one of `blocks` CTAs, after their writes for the last one. Returns
  // true in the last one, which then sees the writes of all, if it reads around L1 (__ldcg).
  __device__ bool is_last(Counter blocks) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = (atomicAdd(counter_, Counter{1}) & kMaxBlocks) + 1 == blocks;
      if (last) *static_cast<volatile Counter*>(counter_) = 0;
      __threadfence();
    }
    __syncthreads();
    return last;
  }

  // The same where whole warps arrive, without the rest of their CTAs: called by all lanes.
  __device__ void open_by_warp() const {
    if (lane_index() == 0) open();
  }
  __device__ bool is_last_warp(Counter warps) const {
    __syncwarp();
    int last = 0;
    if (lane_index() == 0) {
      __threadfence();
      last = (atomicAdd(counter_, Counter{1}) & kMaxBlocks) + 1 == warps;
      if (last) *static_cast<volatile Counter*>(counter_) = 0;
      __threadfence();
    }
    last = __shfl_sync(kAllLanes, last, 0);
    __syncwarp();
    return last != 0;
  }

 private:
  Counter* counter_;
  Counter stamp_;
};

// The stamp of the next launch. Numbers that count up from a random one, mixed (splitmix64).
inline Counter next_stamp() {
  static std::atomic<uint64_t> launches = [] {
    std::random_device random;
    return uint64_t{random()} << 32 | random();
  }();
  uint64_t mixed = launches.fetch_add(0x9e3779b97f4a7c15, std::memory_order_relaxed);
  mixed = (mixed ^ mixed >> 30) * 0xbf58476d1ce4e5b9;
  mixed = (mixed ^ mixed >> 27) * 0x94d049bb133111eb;
  const Counter stamp = (mixed ^ mixed >> 31) >> Arrivals::kCountBits;
  return stamp == 0 ? 1 : stamp;
}

// Scans over the threads of a CTA, for numbers whose order of combination does not matter.

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
    Number total;      // of the CTA
  };

  // Called by all threads. Ends with a barrier, so the next call may follow at once.
  __device__ static Result scan(Shared& shared, Number value) {
    const int lane = lane_index(), warp = static_cast<int>(threadIdx.x) / kWarp;
    value = scan_lanes(value);
    if (lane == kWarp - 1) shared.warp_total[warp] = value;
    __syncthreads();
    // Lanes past the last warp repeat it; their results are not used.
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

// The expert that a row belongs to.

// offsets (E + 1) ascend and offsets[0] <= row < offsets[E]; experts without rows are skipped.
__device__ __forceinline__ int32_t expert_of_row(const int32_t* offsets, int32_t E, int32_t row) {
  int32_t low = 0, high = E;  // offsets[low] <= row < offsets[high]
  while (high - low > 1) {
    const int32_t middle = low + (high - low) / 2;
    if (offsets[middle] <= row)
      low = middle;
    else
      high = middle;
  }
  return low;
}

}  // namespace tilemoe::cuda
