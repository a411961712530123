#include "cuda/core/launch.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/descriptors.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"
#include "pair_kernels.h"
#include "tensor_stages.h"

namespace tilemoe::simulator_test {
namespace {

namespace ptx = cuda::ptx;

constexpr int kBlockRows = kPairRows / 2, kBlockWidth = kPairWidth / 2;
constexpr uint32_t kColumns = kStages * kPairWidth;  // of tensor memory
constexpr int kStageBytes = kBlockRows * 128;        // 16 steps of the 64 that a row has room for
constexpr int kBytes = kStages * kStageBytes + kBlockWidth * 128;

__device__ void produce(Barriers& barriers, uint8_t* memory, const uint16_t* a, const uint16_t* b) {
  const auto rank = static_cast<int>(blockIdx.x % 2);
  stage_rows(memory + kStages * kStageBytes, b + rank * kBlockWidth * kPairSteps, kBlockWidth);
  Pass pass;
  for (int tile = 0; tile < kPairTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);  // awaits_stage
    stage_rows(memory + pass.stage * kStageBytes,
               a + (tile * kPairRows + rank * kBlockRows) * kPairSteps, kBlockRows);
    ptx::mbarrier_arrive(Barriers::at(barriers.full[pass.stage]));
  }
}

// By the first block's warp, for both.
template <Pair kHow>
__device__ void multiply(Barriers& barriers, uint32_t memory, uint32_t tensor) {
  constexpr auto kMajor = cuda::Major::kK;
  constexpr int kBlocks = kHow == Pair::kProductOfOneBlock ? 1 : 2;
  constexpr uint32_t kRows = kHow == Pair::kRowsOfOneBlock || kBlocks == 1 ? kBlockRows : kPairRows;
  constexpr uint32_t kWidth = kHow == Pair::kHalfTheColumns ? kBlockWidth : kPairWidth;
  constexpr uint32_t kInstruction =
      ptx::tcgen05_instruction(ptx::MmaFormat::kBF16, kRows, kWidth, kMajor, kMajor);
  Pass pass;
  for (int tile = 0; tile < kPairTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait_acquire_cluster(Barriers::at(barriers.taken[pass.stage]), pass.parity ^ 1);
    ptx::mbarrier_wait_acquire_cluster(Barriers::at(barriers.full[pass.stage]), pass.parity);
    if (!ptx::elect_one()) continue;
    ptx::fence_proxy_async();
    ptx::tcgen05_fence_after_sync();
    const uint32_t d = tensor + static_cast<uint32_t>(pass.stage) * kPairWidth;
    const uint64_t a = ptx::tcgen05_descriptor(memory + pass.stage * kStageBytes, 1024, 16);
    const uint64_t b = ptx::tcgen05_descriptor(memory + kStages * kStageBytes, 1024, 16);
    ptx::tcgen05_mma_f16<kBlocks>(d, a, b, kInstruction, false);  // multiplies
    const uint32_t empty = Barriers::at(barriers.empty[pass.stage]);
    if (kHow == Pair::kCommitOfOneBlock)
      ptx::tcgen05_commit(empty);  // commits_alone
    else
      ptx::tcgen05_commit_pair(empty, kHow == Pair::kStagesToldToOneBlock ? 1 : 3);  // commits
    ptx::tcgen05_commit_pair(Barriers::at(barriers.done[pass.stage]),
                             kHow == Pair::kAccumulatorsToldToOneBlock ? 1 : 3);
  }
  for (int s = 0; s < kStages; ++s, pass.advance())
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);
}

// By the other block's.
template <Pair kHow>
__device__ void tell(Barriers& barriers) {
  Pass pass;
  for (int tile = 0; tile < kPairTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait(Barriers::at(barriers.full[pass.stage]), pass.parity);
    if (!ptx::elect_one() || kHow == Pair::kOtherStageNotTold) continue;
    if (kHow != Pair::kNoProxyFenceInOther) ptx::fence_proxy_async();
    if (kHow != Pair::kOtherStageNotWaitedFor)
      ptx::mbarrier_arrive_release_cluster(Barriers::in_first(barriers.full[pass.stage]));  // tells
  }
  if (kHow == Pair::kNotSyncedAtEnd || kHow == Pair::kOtherHasEnded) return;
  for (int s = 0; s < kStages; ++s, pass.advance())
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);
}

template <Pair kHow>
__device__ void store(Barriers& barriers, uint32_t tensor, float* out) {
  const auto warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  const auto rank = static_cast<int>(blockIdx.x % 2);
  Pass pass;
  for (int tile = 0; tile < kPairTiles; ++tile, pass.advance()) {
    if (kHow == Pair::kOtherHasEnded && rank == 1 && tile + 1 == kPairTiles) return;
    ptx::mbarrier_wait(Barriers::at(barriers.done[pass.stage]), pass.parity);  // awaits_product
    ptx::tcgen05_fence_after_sync();
    for (int half = 0; half < 2; ++half) {
      const int row = warp * 32 + half * 16;
      float numbers[16];
      const uint32_t from = tensor + (static_cast<uint32_t>(row) << 16) +
                            static_cast<uint32_t>(pass.stage) * kPairWidth;
      ptx::tensor_memory_load_16x32(numbers, from);  // loads
      ptx::tensor_memory_wait_loads();
      const int first = tile * kPairRows + rank * kBlockRows + row;
      for (int i = 0; i < 16; ++i) {
        const int to = (first + lane / 4 + 8 * (i % 4 / 2)) * kPairWidth + 8 * (i / 4);
        out[to + lane % 4 * 2 + i % 2] = numbers[i];
      }
    }
    ptx::tcgen05_fence_before_sync();
    __syncwarp();
    if (kHow == Pair::kOtherLoadsNotWaitedFor && rank == 1) continue;
    if (lane == 0)
      ptx::mbarrier_arrive_release_cluster(Barriers::in_first(barriers.taken[pass.stage]));
  }
}

template <Pair kHow>
__global__ void multiply_pairs(float* out, const uint16_t* a, const uint16_t* b) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, 1024);
  __shared__ Barriers barriers;
  __shared__ uint32_t addresses[2];
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  const bool first = blockIdx.x % 2 == 0;
  uint32_t& address = addresses[kHow == Pair::kAllocatedElsewhere && !first ? 1 : 0];
  if (threadIdx.x == 0) {
    const uint32_t told = first && kHow != Pair::kOtherStageNotWaitedFor ? 1 : 0;
    const uint32_t loads = first && kHow != Pair::kOtherLoadsNotWaitedFor ? 8 : 4;
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(Barriers::at(barriers.full[s]), 32 + told);
      ptx::mbarrier_init(Barriers::at(barriers.empty[s]), 1);
      ptx::mbarrier_init(Barriers::at(barriers.done[s]), 1);
      ptx::mbarrier_init(Barriers::at(barriers.taken[s]), loads);
    }
    ptx::fence_mbarrier_init();
  }
  if (kHow != Pair::kNotSyncedAtFirst) ptx::cluster_sync();
  if (kHow == Pair::kAllocatedByTwoWarps && warp == kProducing)
    ptx::tensor_memory_allocate<kColumns, 2>(ptx::shared_address(&addresses[1]));
  if (warp == kMultiplying && (first || kHow != Pair::kAllocatedByOneBlock)) {
    if (kHow == Pair::kOtherColumns && !first)
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
    tell<kHow>(barriers);
  ptx::tcgen05_fence_before_sync();
  if (kHow == Pair::kOtherHasEnded && !first) return;
  if (kHow == Pair::kNotSyncedAtEnd)
    __syncthreads();
  else
    ptx::cluster_sync();
  if (warp == kMultiplying && (first || kHow != Pair::kFreedByOneBlock)) {
    ptx::tcgen05_fence_after_sync();
    ptx::tensor_memory_free<kColumns, 2>(tensor);  // frees
  }
}

template <Pair kHow>
void run(float* out, const uint16_t* a, const uint16_t* b) {
  constexpr unsigned kBlocks = kHow == Pair::kInClusterOfOne ? 1 : 2;
  cudaFuncSetAttribute(multiply_pairs<kHow>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = kBlocks, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3((kProducing + 1) * 32);
  config.dynamicSmemBytes = kBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, multiply_pairs<kHow>, out, a, b), "a pair");
}

}  // namespace

void pair_tiles(Pair how, float* out, const uint16_t* a, const uint16_t* b) {
  launch_chosen<Pair::kInClusterOfOne>(how, [&](auto one) { run<one()>(out, a, b); });
}

}  // namespace tilemoe::simulator_test
