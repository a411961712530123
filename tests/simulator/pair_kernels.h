// A kernel of tcgen05 by a pair of blocks that is right or wrong in one way, for the tests of the
// simulator. What a test expects to be named is marked in pair_kernels.cu by a comment of one word.
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

enum class Pair {
  kRight,
  kStagesToldToOneBlock,        // that they are empty
  kAccumulatorsToldToOneBlock,  // that they are full
  kOtherStageNotWaitedFor,
  kOtherStageNotTold,
  kNoProxyFenceInOther,  // block, before it tells
  kOtherLoadsNotWaitedFor,
  kNotSyncedAtFirst,  // before both allocate
  kNotSyncedAtEnd,
  kAllocatedByOneBlock,
  kAllocatedByTwoWarps,  // at once
  kOtherColumns,         // are allocated by the other block
  kAllocatedElsewhere,   // the address written to another place in the other block
  kFreedByOneBlock,
  kCommitOfOneBlock,   // of a pair's products
  kProductOfOneBlock,  // in tensor memory that a pair has allocated
  kRowsOfOneBlock,     // a field of the instruction off
  kHalfTheColumns,     // another
  kOtherHasEnded,      // when the last product is started
  kInClusterOfOne,
};

constexpr int kPairTiles = 5, kPairRows = 256, kPairWidth = 32, kPairSteps = 16;
// out (tiles, rows, width) = a (tiles, rows, steps) b (width, steps)^T, of bfloat16.
void pair_tiles(Pair how, float* out, const uint16_t* a, const uint16_t* b);

}  // namespace tilemoe::simulator_test
