// A kernel of 2-CTA tcgen05 that is right or wrong in one way, for the tests of the simulator. A
// comment of one word marks each line of two_cta_kernels.cu that a test expects in a finding.
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

enum class TwoCta {
  kRight,
  kStagesCommittedToOneCta,        // that they are empty
  kAccumulatorsCommittedToOneCta,  // that they are full
  kOtherStageNotWaitedFor,
  kOtherStageNotSignalled,
  kNoProxyFenceInOther,  // CTA, before it arrives at the first CTA's barrier
  kOtherLoadsNotWaitedFor,
  kNotSyncedAtFirst,  // before both allocate
  kNotSyncedAtEnd,
  kAllocatedByOneCta,
  kAllocatedByTwoWarps,  // at once
  kOtherColumns,         // are allocated by the other CTA
  kAllocatedElsewhere,   // the address written to another place in the other CTA
  kFreedByOneCta,
  kCommitOfOneCta,  // of a CTA pair's MMAs
  kMmaOfOneCta,     // in tensor memory that a CTA pair has allocated
  kRowsOfOneCta,    // a wrong field of the instruction
  kHalfTheColumns,  // another field
  kOtherHasEnded,   // when the last MMA is started
  kInClusterOfOne,
};

constexpr int kTwoCtaTiles = 5, kTwoCtaRows = 256, kTwoCtaWidth = 32, kTwoCtaSteps = 16;
// out (tiles, rows, width) = a (tiles, rows, steps) b (width, steps)^T, of bfloat16.
void two_cta_tiles(TwoCta how, float* out, const uint16_t* a, const uint16_t* b);

}  // namespace tilemoe::simulator_test
