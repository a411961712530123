// A tcgen05 kernel that is right or wrong in one way, for the tests of the simulator. A comment of
// one word marks each line of tensor_kernels.cu that a test expects in a finding.
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

enum class Tensor {
  kRight,
  kNoCommit,            // for the warps that wait for an accumulator
  kNoStageCommit,       // for the warp that waits for a stage
  kNoWaitForTurn,       // multiplies into an accumulator that others may still read
  kNoWaitForMmas,       // reads an accumulator while an MMA writes it
  kNoFenceBeforeLoads,  // after the wait for MMAs
  kNoFenceAfterLoads,   // before it signals that an accumulator was read
  kNoFenceBeforeMmas,
  kNoWaitForLoads,   // uses numbers that may not have landed
  kArrivedTooEarly,  // signals that an accumulator was read before it was
  kNoProxyFence,     // after operands were written
  kNotFreed,
  kFreedByAnother,  // warp
  kFreedInUse,
  kAllocatedLate,  // after relinquish_alloc_permit
  kTooManyColumns,
  kOtherLanes,       // of another warp
  kWiderMma,         // a wrong field of the instruction
  kNarrowerRows,     // another field
  kOtherStride,      // a wrong field of an operand's descriptor
  kHoppersVersion,   // another field
  kAddsToNothing,    // to an accumulator that nothing has initialized
  kEndsEarly,        // before the last stages' commits have arrived
  kEndsUncommitted,  // the last MMA
};

constexpr int kTensorTiles = 5, kTensorRows = 128, kTensorWidth = 32, kTensorSteps = 16;
// out (tiles, rows, width) = a (tiles, rows, steps) b (width, steps)^T, of bfloat16.
void tensor_tiles(Tensor how, float* out, const uint16_t* a, const uint16_t* b);

}  // namespace tilemoe::simulator_test
