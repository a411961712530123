// A place in a ring of stages.
#pragma once

#include <cstdint>

namespace tilemoe::cuda {

// A stage and how often the ring has gone round, by parity.
template <int kStages>
struct RingPosition {
  int32_t stage = 0;
  uint32_t parity = 0;

  __device__ void advance() {
    if (++stage == kStages) stage = 0, parity ^= 1;
  }
  // The stage before this one.
  __device__ int32_t before() const { return stage == 0 ? kStages - 1 : stage - 1; }
  __device__ void advance(int32_t stages) {
    const int32_t end = stage + stages;
    stage = end % kStages;
    parity ^= static_cast<uint32_t>(end / kStages) & 1;
  }
};

}  // namespace tilemoe::cuda
