// The ring of stages between the producer and the consumers. Each stage has two barriers:
//   full   ends a phase when the stage's operands have landed: one arrival of the thread that
//          starts TMA, with the bytes it will deliver, and one of each thread that copies.
//   empty  ends a phase when every warp that reads the stage has finished its products, those of
//          the cluster's other block too: its producer writes here as well.
// A waiter must never be two phases behind, since it knows a phase by its parity alone: the
// producer and the consumers of a tile pass every stage in order; of two consumers in ping-pong the
// one whose turn it is not waits at a named barrier, not here.
#pragma once

#include <cstdint>

#include "cuda/core/ring_position.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

// kReadingWarps: of one block.
template <int kStages_, int kFullArrivals, int kReadingWarps, int kCluster>
class Ring {
 public:
  static constexpr int kStages = kStages_;
  static constexpr int kBarrierBytes = 2 * kStages * static_cast<int>(sizeof(uint64_t));
  using Position = RingPosition<kStages>;
  static_assert(kStages >= 3, "fewer stages do not hide the latency of memory");

  __device__ explicit Ring(uint32_t barriers) : barriers_(barriers) {
    if constexpr (kCluster > 1) {
      const uint32_t lane = threadIdx.x % kWarp;
      releasing_ = ptx::cluster_address(barriers, lane < kCluster ? lane : 0);
    }
  }

  __device__ void init() const {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), kFullArrivals);
      ptx::mbarrier_init(empty(stage), kReadingWarps * kCluster);
    }
    ptx::fence_mbarrier_init();
  }

  __device__ uint32_t full(int32_t stage) const { return barriers_ + 8u * stage; }
  __device__ uint32_t empty(int32_t stage) const { return barriers_ + 8u * (kStages + stage); }

  // The first round finds every stage empty without an arrival: the phase before the first counts
  // as ended.
  __device__ void wait_empty(const Position& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ void wait_full(const Position& at) const {
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }

  // A whole warp is done with the stage: lane i tells block i of the cluster.
  __device__ void release(int32_t stage) const {
    if (threadIdx.x % kWarp >= kCluster) return;
    if constexpr (kCluster > 1)
      ptx::mbarrier_arrive_cluster(empty(stage) - barriers_ + releasing_);
    else
      ptx::mbarrier_arrive(empty(stage));
  }

 private:
  uint32_t barriers_;
  uint32_t releasing_;  // the barriers of the block that this lane tells
};

}  // namespace tilemoe::cuda::sm90
