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
#include "cuda/ptx/pin.h"

namespace tilemoe::cuda::sm80 {

// A stage and how often the ring has gone round, by parity.
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;
};

template <int kStageBytes, int kWarps, int kMostStages>
class Ring {
 public:
  static constexpr int kBarrierBytes = 2 * kMostStages * static_cast<int>(sizeof(uint64_t));

  // `stages` of them, which is 2 to kMostStages, begin at `shared`, behind kBarrierBytes of barriers.
  __device__ Ring(uint32_t shared, int32_t stages)
      : barriers_(shared - kBarrierBytes), stages_(stages) {
    // A register: it would be worked out anew for each access. And the first barrier's, not the first
    // stage's: of a barrier that an instruction names by a negative offset, racecheck knows nothing.
    ptx::pin(barriers_);
  }

  // By one thread.
  __device__ void init() const {
    for (int32_t stage = 0; stage < stages_; ++stage) {
      const RingPosition at{stage};
      ptx::mbarrier_init(full(at), kWarps * kWarp);
      ptx::mbarrier_init(empty(at), kWarps * kWarp);
    }
  }

  __device__ uint32_t address(const RingPosition& at) const {
    return barriers_ + kBarrierBytes + at.stage * kStageBytes;
  }
  __device__ void advance(RingPosition& at) const {
    if (++at.stage == stages_) at.stage = 0, at.parity ^= 1;
  }

  // The first round finds every stage empty without an arrival: the phase before the first counts
  // as ended.
  __device__ void wait_empty(const RingPosition& at) const {
    ptx::mbarrier_wait(empty(at), at.parity ^ 1);
  }
  // The stage is full when this thread's copies have landed, and all others'.
  __device__ void fill(const RingPosition& at) const { ptx::cp_async_arrive(full(at)); }
  __device__ void wait_full(const RingPosition& at) const {
    ptx::mbarrier_wait(full(at), at.parity);
  }
  // This thread has read the stage. (One arrival of a warp would do, after __syncwarp(); that leaves
  // no instruction where the warp is together, and racecheck then knows of one lane's reads.)
  __device__ void release(const RingPosition& at) const { ptx::mbarrier_arrive(empty(at)); }

 private:
  __device__ uint32_t full(const RingPosition& at) const {
    return barriers_ + 2 * sizeof(uint64_t) * at.stage;
  }
  __device__ uint32_t empty(const RingPosition& at) const { return full(at) + sizeof(uint64_t); }

  uint32_t barriers_;
  int32_t stages_;
};

}  // namespace tilemoe::cuda::sm80
