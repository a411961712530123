// A kernel of tcgen05 that is right or wrong in one way, for the tests of the simulator. What a test
// expects to be named is marked in tensor_kernels.cu by a comment of one word.
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

enum class Tensor {
  kRight,
  kNoCommit,            // for who waits for an accumulator
  kNoStageCommit,       // for who waits for a stage
  kNoWaitForTurn,       // multiplies into what others may still read
  kNoWaitForProducts,   // reads an accumulator while it is multiplied into
  kNoFenceBeforeLoads,  // after the wait for products
  kNoFenceAfterLoads,   // before telling that an accumulator was read
  kNoFenceBeforeProducts,
  kNoWaitForLoads,  // uses numbers that may not be there
  kToldTooEarly,    // that an accumulator was read
  kNoProxyFence,    // after operands were written
  kNotFreed,
  kFreedByAnother,  // warp
  kFreedInUse,
  kAllocatedLate,  // after the right to was given up
  kTooManyColumns,
  kOtherLanes,       // of another warp
  kWiderProduct,     // a field of the instruction off
  kNarrowerRows,     // another
  kOtherStride,      // a field of an operand's descriptor off
  kHoppersVersion,   // another
  kAddsToNothing,    // to sums that nobody began
  kEndsEarly,        // before the last stages' commits have arrived
  kEndsUncommitted,  // the last product
};

constexpr int kTensorTiles = 5, kTensorRows = 128, kTensorWidth = 32, kTensorSteps = 16;
// out (tiles, rows, width) = a (tiles, rows, steps) b (width, steps)^T, of bfloat16.
void tensor_tiles(Tensor how, float* out, const uint16_t* a, const uint16_t* b);

}  // namespace tilemoe::simulator_test
