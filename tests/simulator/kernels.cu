#include "cuda/core/launch.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mma_sync.h"
#include "cuda/ptx/warp.h"
#include "kernels.h"

namespace tilemoe::simulator_test {
namespace {

using cuda::launch_kernel;
using cuda::launch_pdl;
namespace ptx = cuda::ptx;

template <Mirror kHow>
__global__ void mirror_words(int32_t* out, const int32_t* in) {
  TILEMOE_DYNAMIC_SHARED(int32_t, words, alignof(int32_t));
  const auto thread = static_cast<int>(threadIdx.x), threads = static_cast<int>(blockDim.x);
  for (int turn = 0; turn < 2; ++turn) {
    if (kHow != Mirror::kNeverWritten || thread % 2 == 0)
      words[thread] = in[turn * threads + thread];  // writes
    if (kHow == Mirror::kOnlyAShuffle)
      __shfl_sync(0xffffffff, thread, 0);
    else if (kHow == Mirror::kWarpBarrier)
      __syncwarp();
    else if (kHow == Mirror::kNotAllArrive) {
      // A thread that waits for another barrier has not exited.
      if (thread == 5) ptx::mbarrier_wait(0, 0);
      __syncthreads();  // stuck
    } else if (kHow != Mirror::kNoBarrier)
      __syncthreads();
    int from = threads - 1 - thread;
    if (kHow == Mirror::kPastTheEnd) from = threads - thread;
    const int32_t word = words[from];  // reads
    const int to = turn * threads + thread + (kHow == Mirror::kPastTheArray ? 1 : 0);
    out[to] = word;  // stores
    if (kHow == Mirror::kWarpBarrier)
      __syncwarp();
    else if (kHow != Mirror::kNoSecondBarrier)
      __syncthreads();
  }
}

template <Mirror kHow>
void run_mirror(int32_t* out, const int32_t* in, int threads) {
  launch_kernel(
      "mirror",
      {.blocks = dim3(1), .threads = threads, .stream = nullptr, .shared_bytes = threads * 4},
      mirror_words<kHow>, out, in);
}

struct Cursor {
  int32_t next, end;
};

// Not inlined, so that the compiler cannot know what is set.
__device__ __attribute__((noinline)) void begin(Cursor& cursor, bool begins, int32_t end) {
  if (begins) cursor = {static_cast<int32_t>(threadIdx.x), end};
}

__global__ void look_up_words(bool begins, int32_t* out, const int32_t* in) {
  Cursor cursor;
  begin(cursor, begins, static_cast<int32_t>(blockDim.x));
  out[threadIdx.x] = cursor.next < cursor.end ? in[cursor.next] : 0;  // looks up
}

// Thread t copies four words a step to its place of a stage and reads those of thread t ^ 1.
template <Pipeline kHow>
__global__ void copy_and_sum(int32_t* out, const int32_t* in) {
  constexpr int kStages = 3, kThreads = kPipelineThreads;
  __shared__ __align__(16) int32_t stages[kStages][kThreads][4];
  __shared__ uint64_t full[kStages], empty[kStages];
  const auto thread = static_cast<int>(threadIdx.x);
  if (thread == 0)
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(ptx::shared_address(&full[s]), kThreads);
      ptx::mbarrier_init(ptx::shared_address(&empty[s]),
                         kThreads + (kHow == Pipeline::kTooManyExpected ? 1 : 0));
    }
  if (kHow != Pipeline::kNoInitBarrier) __syncthreads();
  const auto fill = [&](int step) {
    const int s = step % kStages;
    const auto round = static_cast<uint32_t>(step / kStages);
    if (kHow != Pipeline::kNoEmptyWait)
      ptx::mbarrier_wait(ptx::shared_address(&empty[s]), (round & 1) ^ 1);  // awaits_empty
    if (kHow == Pipeline::kOneMoreArrives && step == 0 && thread == 0)
      ptx::mbarrier_arrive_expect_bytes(ptx::shared_address(&full[s]), 16);
    ptx::cp_async_16(ptx::shared_address(stages[s][thread]), in + (step * kThreads + thread) * 4,
                     16);  // fills
    ptx::cp_async_arrive(ptx::shared_address(&full[s]));
  };
  for (int step = 0; step < kStages - 1; ++step) fill(step);
  int32_t sum = 0;
  for (int step = 0; step < kPipelineSteps; ++step) {
    const int s = step % kStages;
    const auto round = static_cast<uint32_t>(step / kStages);
    const uint32_t parity = (round & 1) ^ (kHow == Pipeline::kWrongParity ? 1 : 0);
    if (kHow != Pipeline::kNoFullWait) ptx::mbarrier_wait(ptx::shared_address(&full[s]), parity);
    const uint32_t release = ptx::shared_address(&empty[s]);
    if (kHow == Pipeline::kArrivesEarly) ptx::mbarrier_arrive(release);
    for (int i = 0; i < 4; ++i) sum += stages[s][thread ^ 1][i];  // uses
    if (kHow == Pipeline::kTooFewArrivals && thread == 9) {
    } else if (kHow != Pipeline::kArrivesEarly) {
      ptx::mbarrier_arrive(release);
    }
    if (step + kStages - 1 < kPipelineSteps) fill(step + kStages - 1);
  }
  out[thread] = sum;
}

template <Pipeline kHow>
void run_pipeline(int32_t* out, const int32_t* in) {
  launch_kernel("pipeline", {.blocks = dim3(1), .threads = kPipelineThreads, .stream = nullptr},
                copy_and_sum<kHow>, out, in);
}

template <LastBlock kHow>
__global__ void sum_of_blocks(int32_t* partial, int32_t* out, uint32_t* counter) {
  __shared__ bool last;
  partial[blockIdx.x * blockDim.x + threadIdx.x] = static_cast<int32_t>(blockIdx.x);  // part
  __syncthreads();
  if (threadIdx.x == 0) {
    if (kHow != LastBlock::kNoFence) __threadfence();
    if (kHow == LastBlock::kNoAtomic)
      last = (*counter)++ + 1 == gridDim.x;  // counts
    else
      last = atomicAdd(counter, 1u) + 1 == gridDim.x;
    if (kHow != LastBlock::kNoFence) __threadfence();
  }
  __syncthreads();
  if (!last) return;
  int32_t sum = 0;
  for (unsigned block = 0; block < gridDim.x; ++block)
    sum += partial[block * blockDim.x + threadIdx.x];  // collects
  out[threadIdx.x] = sum;
}

__global__ void write_one(int32_t* out) {
  if (threadIdx.x == 0) out[0] = 7;  // same
}

__global__ void write_numbers(int32_t* data) {
  cuda::pdl_wait();
  cuda::pdl_trigger();
  data[threadIdx.x] = static_cast<int32_t>(threadIdx.x);  // numbers
}
template <bool kWaits>
__global__ void read_numbers(int32_t* out, const int32_t* data) {
  if (kWaits) cuda::pdl_wait();
  out[threadIdx.x] = data[threadIdx.x] + 1;  // early
}
struct OverlapParams {
  int32_t* data;
  int32_t* out;
};
__global__ void first_launch(const OverlapParams params) {
  write_numbers(params.data);
}
template <bool kWaits>
__global__ void second_launch(const OverlapParams params) {
  read_numbers<kWaits>(params.out, params.data);
}

__global__ void multiply_blocks(float* out, const uint16_t* a, const uint16_t* b) {
  __shared__ __align__(16) uint16_t A[16][16], B[8][16];
  const auto lane = static_cast<int>(threadIdx.x);
  for (int i = lane; i < 256; i += 32) A[i / 16][i % 16] = a[i];
  for (int i = lane; i < 128; i += 32) B[i / 16][i % 16] = b[i];
  __syncwarp();
  uint32_t x[4], y[4];
  ptx::ldmatrix_x4(x, ptx::shared_address(&A[lane % 16][lane / 16 * 8]));
  ptx::ldmatrix_x4(y, ptx::shared_address(&B[lane % 8][lane / 8 % 2 * 8]));
  float d[4] = {};
  ptx::mma_m16n8k16(d, x, {y[0], y[1]}, __nv_bfloat16());
  for (int i = 0; i < 4; ++i) out[(lane / 4 + 8 * (i / 2)) * 8 + lane % 4 * 2 + i % 2] = d[i];
}

}  // namespace

void look_up(bool begins, int32_t* out, const int32_t* in, int threads) {
  launch_kernel("look_up", {.blocks = dim3(1), .threads = threads, .stream = nullptr},
                look_up_words, begins, out, in);
}

void mirror(Mirror how, int32_t* out, const int32_t* in, int threads) {
  switch (how) {
    case Mirror::kRight: return run_mirror<Mirror::kRight>(out, in, threads);
    case Mirror::kNoBarrier: return run_mirror<Mirror::kNoBarrier>(out, in, threads);
    case Mirror::kNoSecondBarrier: return run_mirror<Mirror::kNoSecondBarrier>(out, in, threads);
    case Mirror::kOnlyAShuffle: return run_mirror<Mirror::kOnlyAShuffle>(out, in, threads);
    case Mirror::kWarpBarrier: return run_mirror<Mirror::kWarpBarrier>(out, in, threads);
    case Mirror::kNeverWritten: return run_mirror<Mirror::kNeverWritten>(out, in, threads);
    case Mirror::kPastTheEnd: return run_mirror<Mirror::kPastTheEnd>(out, in, threads);
    case Mirror::kPastTheArray: return run_mirror<Mirror::kPastTheArray>(out, in, threads);
    case Mirror::kNotAllArrive: return run_mirror<Mirror::kNotAllArrive>(out, in, threads);
  }
}

void pipeline(Pipeline how, int32_t* out, const int32_t* in) {
  switch (how) {
    case Pipeline::kRight: return run_pipeline<Pipeline::kRight>(out, in);
    case Pipeline::kNoFullWait: return run_pipeline<Pipeline::kNoFullWait>(out, in);
    case Pipeline::kWrongParity: return run_pipeline<Pipeline::kWrongParity>(out, in);
    case Pipeline::kNoEmptyWait: return run_pipeline<Pipeline::kNoEmptyWait>(out, in);
    case Pipeline::kTooFewArrivals: return run_pipeline<Pipeline::kTooFewArrivals>(out, in);
    case Pipeline::kTooManyExpected: return run_pipeline<Pipeline::kTooManyExpected>(out, in);
    case Pipeline::kOneMoreArrives: return run_pipeline<Pipeline::kOneMoreArrives>(out, in);
    case Pipeline::kNoInitBarrier: return run_pipeline<Pipeline::kNoInitBarrier>(out, in);
    case Pipeline::kArrivesEarly: return run_pipeline<Pipeline::kArrivesEarly>(out, in);
  }
}

void last_block(LastBlock how, int32_t* partial, int32_t* out, uint32_t* counter, int blocks) {
  const cuda::KernelLaunch where{
      .blocks = dim3(static_cast<unsigned>(blocks)), .threads = 32, .stream = nullptr};
  const auto run = [&](const auto kernel) {
    launch_kernel("the last block", where, kernel, partial, out, counter);
  };
  switch (how) {
    case LastBlock::kRight: return run(sum_of_blocks<LastBlock::kRight>);
    case LastBlock::kNoFence: return run(sum_of_blocks<LastBlock::kNoFence>);
    case LastBlock::kNoAtomic: return run(sum_of_blocks<LastBlock::kNoAtomic>);
  }
}

void all_write_one(int32_t* out, int blocks) {
  launch_kernel("one word",
                {.blocks = dim3(static_cast<unsigned>(blocks)), .threads = 32, .stream = nullptr},
                write_one, out);
}

void overlapping_launches(bool waits, int32_t* data, int32_t* out) {
  const OverlapParams params{data, out};
  const cuda::PdlLaunch where{
      .device = cuda::current_device(), .blocks = dim3(1), .threads = 64, .stream = nullptr};
  launch_pdl<first_launch>(where, params);
  if (waits)
    launch_pdl<second_launch<true>>(where, params);
  else
    launch_pdl<second_launch<false>>(where, params);
}

void multiply(float* out, const uint16_t* a, const uint16_t* b) {
  launch_kernel("an MMA", {.blocks = dim3(1), .threads = 32, .stream = nullptr}, multiply_blocks,
                out, a, b);
}

}  // namespace tilemoe::simulator_test
