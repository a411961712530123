// Rings between roles, of stages of operands and of accumulators. Each place has two barriers:
//   full   ends a phase when what is in it may be read
//   empty  ends a phase when nobody reads it any more
// Both of its sides pass every place in order, so that none is two phases behind the other.
//
// Blocks of a pair have a ring each. In the first one's a place is full when the other's is as
// well, which arrives for it; and empty, of accumulators, when both blocks' warps have read theirs:
// all of them arrive there.
#pragma once

#include <cstdint>

#include "cuda/core/ring_position.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/mbarrier.h"

namespace tilemoe::cuda::sm100 {

// Arrivals are those of one block.
template <int kPlaces_, int kFullArrivals, int kEmptyArrivals, int kBlocks>
class Ring {
 public:
  static constexpr int kPlaces = kPlaces_;
  static constexpr int kBarrierBytes = 2 * kPlaces * static_cast<int>(sizeof(uint64_t));
  using Position = RingPosition<kPlaces>;

  __device__ explicit Ring(uint32_t barriers) : barriers_(barriers) {}

  // By one thread; ptx::fence_mbarrier_init() follows. `told_full` and `told_empty`: how often the
  // other block of a pair arrives here.
  __device__ void init(int32_t told_full, int32_t told_empty) const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), kFullArrivals + told_full);
      ptx::mbarrier_init(empty(place), kEmptyArrivals + told_empty);
    }
  }

  __device__ uint32_t full(int32_t place) const { return barriers_ + 8u * place; }
  __device__ uint32_t empty(int32_t place) const { return barriers_ + 8u * (kPlaces + place); }

  // The first round finds every place empty without an arrival: the phase before the first counts as
  // ended.
  __device__ void wait_empty(const Position& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ void wait_full(const Position& at) const {
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }

  // The same in a pair's first block, for what both have done.
  __device__ void wait_empty_in_all(const Position& at) const {
    if constexpr (kBlocks > 1)
      ptx::mbarrier_wait_acquire_cluster(empty(at.stage), at.parity ^ 1);
    else
      wait_empty(at);
  }
  __device__ void wait_full_in_all(const Position& at) const {
    if constexpr (kBlocks > 1)
      ptx::mbarrier_wait_acquire_cluster(full(at.stage), at.parity);
    else
      wait_full(at);
  }

  // Tells the block that multiplies: of a pair, its first.
  __device__ void tell_full(int32_t place) const { tell(full(place)); }
  __device__ void tell_empty(int32_t place) const { tell(empty(place)); }

 private:
  __device__ static void tell(uint32_t barrier) {
    if constexpr (kBlocks > 1)
      ptx::mbarrier_arrive_release_cluster(ptx::cluster_address(barrier, 0));
    else
      ptx::mbarrier_arrive(barrier);
  }

  uint32_t barriers_;
};

}  // namespace tilemoe::cuda::sm100
