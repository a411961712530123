#include "cuda/core/launch.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/descriptors.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"
#include "tensor_stages.h"
#include "two_cta_kernels.h"

namespace tilemoe::simulator_test {
namespace {

namespace ptx = cuda::ptx;

constexpr int kCtaRows = kTwoCtaRows / 2, kCtaWidth = kTwoCtaWidth / 2;
constexpr uint32_t kColumns = kStages * kTwoCtaWidth;  // of tensor memory
constexpr int kStageBytes = kCtaRows * 128;            // 16 steps of the 64 that a row has room for
constexpr int kBytes = kStages * kStageBytes + kCtaWidth * 128;

__device__ void produce(Barriers& barriers, uint8_t* memory, const uint16_t* a, const uint16_t* b) {
  const auto rank = static_cast<int>(blockIdx.x % 2);
  stage_rows(memory + kStages * kStageBytes, b + rank * kCtaWidth * kTwoCtaSteps, kCtaWidth);
  Pass pass;
  for (int tile = 0; tile < kTwoCtaTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);  // awaits_stage
    stage_rows(memory + pass.stage * kStageBytes,
               a + (tile * kTwoCtaRows + rank * kCtaRows) * kTwoCtaSteps, kCtaRows);
    ptx::mbarrier_arrive(Barriers::at(barriers.full[pass.stage]));
  }
}

// Runs in the first CTA's warp, for both CTAs.
template <TwoCta kHow>
__device__ void multiply(Barriers& barriers, uint32_t memory, uint32_t tensor) {
  constexpr auto kMajor = cuda::Major::kK;
  constexpr int kCtas = kHow == TwoCta::kMmaOfOneCta ? 1 : 2;
  constexpr uint32_t kRows = kHow == TwoCta::kRowsOfOneCta || kCtas == 1 ? kCtaRows : kTwoCtaRows;
  constexpr uint32_t kWidth = kHow == TwoCta::kHalfTheColumns ? kCtaWidth : kTwoCtaWidth;
  constexpr uint32_t kInstruction =
      ptx::tcgen05_instruction(ptx::MmaFormat::kBF16, kRows, kWidth, kMajor, kMajor);
  Pass pass;
  for (int tile = 0; tile < kTwoCtaTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait_acquire_cluster(Barriers::at(barriers.taken[pass.stage]), pass.parity ^ 1);
    ptx::mbarrier_wait_acquire_cluster(Barriers::at(barriers.full[pass.stage]), pass.parity);
    if (!ptx::elect_one()) continue;
    ptx::fence_proxy_async();
    ptx::tcgen05_fence_after_sync();
    const uint32_t d = tensor + static_cast<uint32_t>(pass.stage) * kTwoCtaWidth;
    const uint64_t a = ptx::tcgen05_descriptor(memory + pass.stage * kStageBytes, 1024, 16);
    const uint64_t b = ptx::tcgen05_descriptor(memory + kStages * kStageBytes, 1024, 16);
    ptx::tcgen05_mma_f16<kCtas>(d, a, b, kInstruction, false);  // multiplies
    const uint32_t empty = Barriers::at(barriers.empty[pass.stage]);
    if (kHow == TwoCta::kCommitOfOneCta)
      ptx::tcgen05_commit(empty);  // commits_alone
    else
      ptx::tcgen05_commit_2cta(empty, kHow == TwoCta::kStagesCommittedToOneCta ? 1 : 3);  // commits
    ptx::tcgen05_commit_2cta(Barriers::at(barriers.done[pass.stage]),
                             kHow == TwoCta::kAccumulatorsCommittedToOneCta ? 1 : 3);
  }
  for (int s = 0; s < kStages; ++s, pass.advance())
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);
}

// Runs in the other CTA: signals to the first one that the stage is full.
template <TwoCta kHow>
__device__ void signal_first(Barriers& barriers) {
  Pass pass;
  for (int tile = 0; tile < kTwoCtaTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait(Barriers::at(barriers.full[pass.stage]), pass.parity);
    if (!ptx::elect_one() || kHow == TwoCta::kOtherStageNotSignalled) continue;
    if (kHow != TwoCta::kNoProxyFenceInOther) ptx::fence_proxy_async();
    if (kHow != TwoCta::kOtherStageNotWaitedFor)
      ptx::mbarrier_arrive_release_cluster(
          Barriers::in_first(barriers.full[pass.stage]));  // signals
  }
  if (kHow == TwoCta::kNotSyncedAtEnd || kHow == TwoCta::kOtherHasEnded) return;
  for (int s = 0; s < kStages; ++s, pass.advance())
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);
}

template <TwoCta kHow>
__device__ void store(Barriers& barriers, uint32_t tensor, float* out) {
  const auto warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto rank = static_cast<int>(blockIdx.x % 2);
  Pass pass;
  for (int tile = 0; tile < kTwoCtaTiles; ++tile, pass.advance()) {
    if (kHow == TwoCta::kOtherHasEnded && rank == 1 && tile + 1 == kTwoCtaTiles) return;
    ptx::mbarrier_wait(Barriers::at(barriers.done[pass.stage]), pass.parity);  // awaits_mma
    ptx::tcgen05_fence_after_sync();
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 32 + half * 16;
      float numbers[16];
      const uint32_t from = tensor + (static_cast<uint32_t>(row) << 16) +
                            static_cast<uint32_t>(pass.stage) * kTwoCtaWidth;
      ptx::tensor_memory_load_16x32(numbers, from);  // loads
      ptx::tensor_memory_wait_loads();
      const int first = tile * kTwoCtaRows + rank * kCtaRows + row;
      for (int i = 0; i < 16; ++i) {
        const int to = (first + lane / 4 + 8 * (i % 4 / 2)) * kTwoCtaWidth + 8 * (i / 4);
        out[to + lane % 4 * 2 + i % 2] = numbers[i];
      }
    }
    ptx::tcgen05_fence_before_sync();
    __syncwarp();
    if (kHow == TwoCta::kOtherLoadsNotWaitedFor && rank == 1) continue;
    if (lane == 0)
      ptx::mbarrier_arrive_release_cluster(Barriers::in_first(barriers.taken[pass.stage]));
  }
}

template <TwoCta kHow>
__global__ void multiply_2cta(float* out, const uint16_t* a, const uint16_t* b) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, 1024);
  __shared__ Barriers barriers;
  __shared__ uint32_t addresses[2];
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const bool first = blockIdx.x % 2 == 0;
  uint32_t& address = addresses[kHow == TwoCta::kAllocatedElsewhere && !first ? 1 : 0];
  if (threadIdx.x == 0) {
    const uint32_t signals = first && kHow != TwoCta::kOtherStageNotWaitedFor ? 1 : 0;
    const uint32_t loads = first && kHow != TwoCta::kOtherLoadsNotWaitedFor ? 8 : 4;
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(Barriers::at(barriers.full[s]), 32 + signals);
      ptx::mbarrier_init(Barriers::at(barriers.empty[s]), 1);
      ptx::mbarrier_init(Barriers::at(barriers.done[s]), 1);
      ptx::mbarrier_init(Barriers::at(barriers.taken[s]), loads);
    }
    ptx::fence_mbarrier_init();
  }
  if (kHow != TwoCta::kNotSyncedAtFirst) ptx::cluster_sync();
  if (kHow == TwoCta::kAllocatedByTwoWarps && warp == kProducing)
    ptx::tensor_memory_allocate<kColumns, 2>(ptx::shared_address(&addresses[1]));
  if (warp == kMultiplying && (first || kHow != TwoCta::kAllocatedByOneCta)) {
    if (kHow == TwoCta::kOtherColumns && !first)
      ptx::tensor_memory_allocate<2 * kColumns, 2>(
          ptx::shared_address(&address));  // allocates_more
    else
      ptx::tensor_memory_allocate<kColumns, 2>(ptx::shared_address(&address));  // allocates
    ptx::tensor_memory_relinquish<2>();
  }
  __syncthreads();
  const uint32_t tensor = address;
  if (warp < kMultiplying)
    store<kHow>(barriers, tensor, out);
  else if (warp == kProducing)
    produce(barriers, memory, a, b);
  else if (first)
    multiply<kHow>(barriers, ptx::shared_address(memory), tensor);
  else
    signal_first<kHow>(barriers);
  ptx::tcgen05_fence_before_sync();
  if (kHow == TwoCta::kOtherHasEnded && !first) return;
  if (kHow == TwoCta::kNotSyncedAtEnd)
    __syncthreads();
  else
    ptx::cluster_sync();
  if (warp == kMultiplying && (first || kHow != TwoCta::kFreedByOneCta)) {
    ptx::tcgen05_fence_after_sync();
    ptx::tensor_memory_free<kColumns, 2>(tensor);  // frees
  }
}

template <TwoCta kHow>
void run(float* out, const uint16_t* a, const uint16_t* b) {
  constexpr unsigned kCtas = kHow == TwoCta::kInClusterOfOne ? 1 : 2;
  cudaFuncSetAttribute(multiply_2cta<kHow>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = kCtas, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kCtas);
  config.blockDim = dim3((kProducing + 1) * 32);
  config.dynamicSmemBytes = kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, multiply_2cta<kHow>, out, a, b), "a CTA pair");
}

}  // namespace

void two_cta_tiles(TwoCta how, float* out, const uint16_t* a, const uint16_t* b) {
  launch_chosen<TwoCta::kInClusterOfOne>(how, [&](auto one) { run<one()>(out, a, b); });
}

}  // namespace tilemoe::simulator_test
