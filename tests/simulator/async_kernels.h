// Kernels that use the async proxy, each right or wrong in one way. A comment of one word marks
// each line of async_kernels.cu that a test expects in a finding.
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

// D (64, 64) = sum over steps of A_step (64, 64) B^T: A by TMA through a ring of two stages, B
// written by threads, MMAs by wgmma, D in bfloat16 by TMA. In a cluster of two, CTA 0 loads A for
// both.
enum class Gemm {
  kRight,
  kNoInitFence,   // of the barriers at which copies arrive
  kNoFullWait,    // multiplies a stage without waiting for it
  kTooFewBytes,   // expects half of a stage's
  kTooManyBytes,  // expects twice as many
  kNoEmptyWait,   // loads into a stage that MMAs may still read
  kNoWgmmaWait,   // releases a stage whose MMAs are under way
  kNoOperandFence,
  kNoWgmmaFence,
  kReadsEarly,   // reads D before it has waited for the MMAs
  kWrongStride,  // of A's groups of rows
  kNoStoreFence,
  kNoStoreBarrier,    // between writing D to shared memory and its store
  kNoStoreWait,       // ends while the store may read shared memory
  kSlotWrittenEarly,  // while the store may read it
};
constexpr int kGemmSteps = 5, kGemmRows = 64;
// A (kGemmSteps * 64, 64), B (64, 64), D (64, 64) of each block, bfloat16.
void multiply_steps(Gemm how, uint16_t* D, const uint16_t* A, const uint16_t* B);

enum class Cluster {
  kRight,
  kNoFirstSync,  // the other CTA's barriers may not be initialized yet
  kNoLastSync,   // a CTA may end before the other arrives at its barriers
  kNoPeerWait,   // loads into the other CTA's stage without its release
};
void multiply_in_cluster(Cluster how, uint16_t* D, const uint16_t* A, const uint16_t* B);

}  // namespace tilemoe::simulator_test
