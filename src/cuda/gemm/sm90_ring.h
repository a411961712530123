// The barriers of the Hopper kernels, and the ring of stages.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/ptx/barriers.h"

namespace tilemoe::cuda::sm90 {

// Named barriers, one per direction.
enum class NamedBarrier : uint32_t {
  kBlock = 0,      // __syncthreads()
  kPingPong0 = 1,  // ping-pong: consumer 1 hands the ring to consumer 0
  kPingPong1 = 2,
  kStore0 = 3,  // the warps of consumer 0, which store together
  kStore1 = 4,
};

__device__ constexpr uint32_t number_of(NamedBarrier first, int consumer) {
  return static_cast<uint32_t>(first) + static_cast<uint32_t>(consumer);
}

// The ring of stages between the producer and the consumers. Each stage has two mbarriers:
//   full   completes a phase when the stage's operands have landed: one arrival of the thread that
//          starts TMA, with the bytes to expect, and one of each thread that copies.
//   empty  completes a phase when every warp that reads the stage has finished its MMAs, including
//          those of the cluster's other CTA, whose producer writes to this stage as well.
// A waiter knows a phase by its parity only, so it must never be two phases behind: the producer
// and the consumers of a tile pass every stage in order, and in ping-pong the inactive consumer
// waits at a named barrier instead.
//
// kReadingWarps: of one CTA.
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

  // In the first round every stage is empty without an arrival: the phase before the first counts
  // as ended.
  __device__ void wait_empty(const Position& at) const {
    ptx::mbarrier_wait(empty(at.stage), at.parity ^ 1);
  }
  __device__ void wait_full(const Position& at) const {
    ptx::mbarrier_wait(full(at.stage), at.parity);
  }

  // Called by a whole warp that has read the stage: lane i arrives at CTA i of the cluster.
  __device__ void release(int32_t stage) const {
    if (threadIdx.x % kWarp >= kCluster) return;
    if constexpr (kCluster > 1)
      ptx::mbarrier_arrive_cluster(empty(stage) - barriers_ + releasing_);
    else
      ptx::mbarrier_arrive(empty(stage));
  }

 private:
  uint32_t barriers_;
  uint32_t releasing_;  // the barriers of the CTA at which this lane arrives
};

}  // namespace tilemoe::cuda::sm90
