// Kernels of the async proxy, made to be right or wrong in one way each. What a test expects to be
// named is marked in async_kernels.cu by a comment of one word.
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

// D (64, 64) = sum over steps of A_step (64, 64) B^T: A by TMA through a ring of two stages, B
// written by threads, products by wgmma, D in bfloat16 by TMA. In a cluster of two, block 0 brings A
// for both.
enum class Product {
  kRight,
  kNoInitFence,    // of the barriers at which copies arrive
  kNoFullWait,     // multiplies a stage without waiting for it
  kTooFewBytes,    // expects half of a stage's
  kTooManyBytes,   // expects twice as many
  kNoEmptyWait,    // loads into a stage that products may still read
  kNoProductWait,  // releases a stage whose products are under way
  kNoOperandFence,
  kNoWgmmaFence,
  kReadsEarly,   // takes D before its products have been waited for
  kWrongStride,  // of A's groups of rows
  kNoStoreFence,
  kNoStoreBarrier,    // between writing D to shared memory and its store
  kNoStoreWait,       // ends while the store may read shared memory
  kSlotWrittenEarly,  // while the store may read it
};
constexpr int kProductSteps = 5, kProductRows = 64;
// A (kProductSteps * 64, 64), B (64, 64), D (64, 64) of each block, bfloat16.
void multiply_steps(Product how, uint16_t* D, const uint16_t* A, const uint16_t* B);

enum class Cluster {
  kRight,
  kNoFirstSync,  // the other block's barriers may not be there yet
  kNoLastSync,   // a block may end before the other has told it what it has read
  kNoPeerWait,   // loads into the other block's stage without its release
};
void multiply_in_cluster(Cluster how, uint16_t* D, const uint16_t* A, const uint16_t* B);

}  // namespace tilemoe::simulator_test
