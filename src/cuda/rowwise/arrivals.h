// Which of a kernel's blocks arrives last, told by a counter in scratch, whose contents nobody has
// to clear: no launch before the kernel, no state that outlives a call and that two streams could
// meet at.
//
// A counter has a stamp and, in its low bits, how many blocks arrived. Every launch has a stamp of
// its own, a random number to whatever the memory held. A block that does not find it puts it there,
// with none arrived, by one compare-and-swap: where that fails another block was first. The last
// block leaves 0, which is no stamp, since a launch in a CUDA graph has the same one on every replay.
// A counter is taken for opened where it was not if 48 bits of what others left there are the
// launch's: of random memory one in 2^48.
#pragma once

#include <atomic>
#include <cstdint>
#include <random>

namespace tilemoe::cuda {

using Counter = unsigned long long;

class Arrivals {
 public:
  static constexpr int kCountBits = 16;
  static constexpr Counter kMostBlocks = (Counter{1} << kCountBits) - 1;

  __device__ Arrivals(Counter* counter, Counter stamp) : counter_(counter), stamp_(stamp) {}

  // Called by thread 0 of every block that is to arrive, some time before it does: it takes two
  // round trips to L2, beside which there may be other work.
  __device__ void open() const {
    const Counter seen = *static_cast<volatile Counter*>(counter_);
    if (seen >> kCountBits != stamp_) atomicCAS(counter_, seen, stamp_ << kCountBits);
  }

  // Called by all threads of one of `blocks` blocks, after what they wrote for the last one. True in
  // that one, which then sees what all of them wrote, if it reads around L1 (__ldcg).
  __device__ bool is_last(Counter blocks) const {
    __shared__ bool last;
    __syncthreads();
    if (threadIdx.x == 0) {
      __threadfence();
      last = (atomicAdd(counter_, Counter{1}) & kMostBlocks) + 1 == blocks;
      if (last) *static_cast<volatile Counter*>(counter_) = 0;
      __threadfence();
    }
    __syncthreads();
    return last;
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

}  // namespace tilemoe::cuda
