// Kernels that are right or wrong in one way each, for the tests of the simulator. A comment of one
// word marks each line of kernels.cu that a test expects in a finding: line_of("word").
#pragma once

#include <cstdint>

namespace tilemoe::simulator_test {

// ---- shared memory and the barriers of a block and a warp
enum class Mirror {
  kRight,
  kNoBarrier,        // between writing and reading
  kNoSecondBarrier,  // between reading and writing again
  kOnlyAShuffle,     // in place of __syncthreads(); one warp
  kWarpBarrier,      // __syncwarp() instead, which is enough for one warp
  kNeverWritten,     // half of the words are
  kPastTheEnd,       // of dynamic shared memory
  kPastTheArray,     // of device memory
  kNotAllArrive,     // at __syncthreads()
};
void mirror(Mirror how, int32_t* out, const int32_t* in, int threads);

// ---- a thread's own variables
// Every thread looks up its word of `in`; without `begins`, at an index that nothing has set.
void look_up(bool begins, int32_t* out, const int32_t* in, int threads);

// ---- cp.async and barriers in shared memory: a ring of stages
enum class Pipeline {
  kRight,
  kNoFullWait,      // reads a stage without waiting for it
  kWrongParity,     // waits for the phase before
  kNoEmptyWait,     // fills a stage that others may still read
  kTooFewArrivals,  // one thread does not release its stage
  kTooManyExpected,
  kOneMoreArrives,  // with bytes that never come, before the copies have arrived
  kNoInitBarrier,   // barriers are used before all threads know of them
  kArrivesEarly,    // releases the stage before it has read it
};
constexpr int kPipelineThreads = 64, kPipelineSteps = 9;
// out[i] = the sum over steps of in[step * kPipelineThreads * 4 + ...], see kernels.cu.
void pipeline(Pipeline how, int32_t* out, const int32_t* in);

// ---- several blocks
enum class LastBlock { kRight, kNoFence, kNoAtomic };
// Every block writes its number to `partial`; the last one sums them up.
void last_block(LastBlock how, int32_t* partial, int32_t* out, uint32_t* counter, int blocks);
void all_write_one(int32_t* out, int blocks);

// ---- launches that overlap
void overlapping_launches(bool waits, int32_t* data, int32_t* out);

// ---- a warp's matrices
void multiply(float* out, const uint16_t* a, const uint16_t* b);  // (16, 8) = (16, 16) (8, 16)^T

}  // namespace tilemoe::simulator_test
