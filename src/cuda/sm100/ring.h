// Rings between roles, of stages of operands and of accumulators. Each place has two barriers:
//   full   ends a phase when what is in it may be read
//   empty  ends a phase when nobody reads it any more
// Both of its sides pass every place in order, so that none is two phases behind the other.
#pragma once

#include <cstdint>

#include "cuda/core/ring_position.h"
#include "cuda/ptx/mbarrier.h"

namespace tilemoe::cuda::sm100 {

template <int kPlaces, int kFullArrivals, int kEmptyArrivals>
class Ring {
 public:
  static constexpr int kBarrierBytes = 2 * kPlaces * static_cast<int>(sizeof(uint64_t));
  using Position = RingPosition<kPlaces>;

  __device__ explicit Ring(uint32_t barriers) : barriers_(barriers) {}

  // By one thread; ptx::fence_mbarrier_init() follows.
  __device__ void init() const {
    for (int place = 0; place < kPlaces; ++place) {
      ptx::mbarrier_init(full(place), kFullArrivals);
      ptx::mbarrier_init(empty(place), kEmptyArrivals);
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

 private:
  uint32_t barriers_;
};

}  // namespace tilemoe::cuda::sm100
