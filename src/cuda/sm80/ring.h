// The ring of stages that every warp copies to and reads from. Each stage has two barriers:
//   full   ends a phase when all threads' copies to the stage have landed
//   empty  ends a phase when every thread has read it
// So warps never wait for each other but through a stage, and may be k blocks apart. None can be two
// phases ahead of another: it would have to fill a stage that the other has not read.
#pragma once

#include <cstdint>

#include "cuda/core/warp.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/mbarrier.h"

namespace tilemoe::cuda::sm80 {

// A stage and how often the ring has gone round, by parity.
struct RingPosition {
  uint32_t stage;    // its address
  uint32_t barrier;  // the first of its two
  uint32_t parity = 0;
};

template <int kStageBytes, int kWarps, int kMostStages>
class Ring {
 public:
  static constexpr int kBarrierBytes = 2 * kMostStages * static_cast<int>(sizeof(uint64_t));

  // `stages` of them, which is 2 to kMostStages, begin at `shared`.
  __device__ Ring(uint32_t shared, uint32_t barriers, int32_t stages)
      : shared_(shared), barriers_(barriers), stages_(stages) {}

  // By one thread.
  __device__ void init() const {
    for (int32_t stage = 0; stage < stages_; ++stage) {
      ptx::mbarrier_init(barriers_ + 16 * stage, kWarps * kWarp);
      ptx::mbarrier_init(barriers_ + 16 * stage + 8, kWarps * kWarp);
    }
  }

  __device__ RingPosition first() const { return {shared_, barriers_}; }
  __device__ void advance(RingPosition& at) const {
    at.stage += kStageBytes;
    at.barrier += 16;
    if (at.barrier == barriers_ + 16 * stages_) {
      at.stage = shared_;
      at.barrier = barriers_;
      at.parity ^= 1;
    }
  }

  // The first round finds every stage empty without an arrival: the phase before the first counts
  // as ended.
  __device__ static void wait_empty(const RingPosition& at) {
    ptx::mbarrier_wait(at.barrier + 8, at.parity ^ 1);
  }
  // The stage is full when this thread's copies have landed, and all others'.
  __device__ static void fill(const RingPosition& at) { ptx::cp_async_arrive(at.barrier); }
  __device__ static void wait_full(const RingPosition& at) {
    ptx::mbarrier_wait(at.barrier, at.parity);
  }
  // This thread has read the stage. (One arrival of a warp would do, after __syncwarp(); that leaves
  // no instruction where the warp is together, and racecheck then knows of one lane's reads.)
  __device__ static void release(const RingPosition& at) { ptx::mbarrier_arrive(at.barrier + 8); }

 private:
  uint32_t shared_, barriers_;
  int32_t stages_;
};

}  // namespace tilemoe::cuda::sm80
