#include "cuda/core/launch.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/descriptors.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"
#include "tensor_kernels.h"
#include "tensor_stages.h"

namespace tilemoe::simulator_test {
namespace {

namespace ptx = cuda::ptx;

constexpr uint32_t kColumns = kStages * kTensorWidth;  // of tensor memory
constexpr int kStageBytes = kTensorRows * 128;         // 16 steps of the 64 that a row has room for
constexpr int kBytes = kStages * kStageBytes + kTensorWidth * 128;

template <Tensor kHow>
__device__ void produce(Barriers& barriers, uint8_t* memory, const uint16_t* a, const uint16_t* b) {
  stage_rows(memory + kStages * kStageBytes, b, kTensorWidth);
  Pass pass;
  for (int tile = 0; tile < kTensorTiles; ++tile, pass.advance()) {
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);  // awaits_stage
    stage_rows(memory + pass.stage * kStageBytes, a + tile * kTensorRows * kTensorSteps,
               kTensorRows);
    if (kHow != Tensor::kNoProxyFence) ptx::fence_proxy_async();
    ptx::mbarrier_arrive(Barriers::at(barriers.full[pass.stage]));
  }
}

template <Tensor kHow>
__device__ void multiply(Barriers& barriers, uint32_t memory, uint32_t tensor) {
  constexpr auto kMajor = cuda::Major::kK;
  constexpr uint32_t kWidth = kTensorWidth + (kHow == Tensor::kWiderMma ? 16 : 0);
  constexpr uint32_t kRows = kTensorRows - (kHow == Tensor::kNarrowerRows ? 64 : 0);
  constexpr uint32_t kInstruction =
      ptx::tcgen05_instruction(ptx::MmaFormat::kBF16, kRows, kWidth, kMajor, kMajor);
  constexpr uint32_t kStride = kHow == Tensor::kOtherStride ? 2048 : 1024;
  const auto descriptor = [](uint32_t shared, uint32_t stride) {
    const uint64_t bits = ptx::tcgen05_descriptor(shared, stride, 16);
    return kHow == Tensor::kHoppersVersion ? bits & ~(uint64_t{1} << 46) : bits;
  };
  Pass pass;
  for (int tile = 0; tile < kTensorTiles; ++tile, pass.advance()) {
    if (kHow != Tensor::kNoWaitForTurn)
      ptx::mbarrier_wait(Barriers::at(barriers.taken[pass.stage]), pass.parity ^ 1);
    ptx::mbarrier_wait(Barriers::at(barriers.full[pass.stage]), pass.parity);
    if (!ptx::elect_one()) continue;
    if (kHow != Tensor::kNoFenceBeforeMmas) ptx::tcgen05_fence_after_sync();
    const uint32_t d = tensor + static_cast<uint32_t>(pass.stage) * kTensorWidth;
    const uint64_t a = descriptor(memory + pass.stage * kStageBytes, kStride);
    const uint64_t b = descriptor(memory + kStages * kStageBytes, 1024);
    constexpr bool kAdds = kHow == Tensor::kAddsToNothing;
    ptx::tcgen05_mma_f16<1>(d, a, b, kInstruction, kAdds);  // multiplies
    if (kHow == Tensor::kEndsUncommitted && tile + 1 == kTensorTiles) continue;
    if (kHow != Tensor::kNoStageCommit)
      ptx::tcgen05_commit(Barriers::at(barriers.empty[pass.stage]));  // commits
    if (kHow != Tensor::kNoCommit) ptx::tcgen05_commit(Barriers::at(barriers.done[pass.stage]));
  }
  if (kHow == Tensor::kEndsEarly || kHow == Tensor::kEndsUncommitted || kHow == Tensor::kFreedInUse)
    return;
  for (int s = 0; s < kStages; ++s, pass.advance())
    ptx::mbarrier_wait(Barriers::at(barriers.empty[pass.stage]), pass.parity ^ 1);
}

template <Tensor kHow>
__device__ void store(Barriers& barriers, uint32_t tensor, float* out) {
  const auto warp = static_cast<int>(threadIdx.x) / 32, lane = static_cast<int>(threadIdx.x) % 32;
  constexpr int kTiles = kTensorTiles - (kHow == Tensor::kEndsUncommitted ? 1 : 0);
  Pass pass;
  for (int tile = 0; tile < kTiles; ++tile, pass.advance()) {
    if (kHow != Tensor::kNoWaitForMmas)
      ptx::mbarrier_wait(Barriers::at(barriers.done[pass.stage]), pass.parity);  // awaits_mma
    if (kHow != Tensor::kNoFenceBeforeLoads) ptx::tcgen05_fence_after_sync();
    const uint32_t taken = Barriers::at(barriers.taken[pass.stage]);
    if (kHow == Tensor::kArrivedTooEarly) {
      ptx::tcgen05_fence_before_sync();
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(taken);
    }
    for (int half = 0; half < 2; ++half) {
      const int row = (kHow == Tensor::kOtherLanes ? (warp + 1) % 4 : warp) * 32 + half * 16;
      float numbers[16];
      const uint32_t from = tensor + (static_cast<uint32_t>(row) << 16) +
                            static_cast<uint32_t>(pass.stage) * kTensorWidth;
      ptx::tensor_memory_load_16x32(numbers, from);  // loads
      if (kHow != Tensor::kNoWaitForLoads) ptx::tensor_memory_wait_loads();
      for (int i = 0; i < 16; ++i) {
        const int to = (tile * kTensorRows + row + lane / 4 + 8 * (i % 4 / 2)) * kTensorWidth +
                       8 * (i / 4) + lane % 4 * 2 + i % 2;
        out[to] = numbers[i];  // uses
      }
    }
    if (kHow == Tensor::kArrivedTooEarly) continue;
    if (kHow != Tensor::kNoFenceAfterLoads) ptx::tcgen05_fence_before_sync();
    __syncwarp();
    if (lane == 0) ptx::mbarrier_arrive(taken);
  }
}

template <Tensor kHow>
__global__ void multiply_tiles(float* out, const uint16_t* a, const uint16_t* b) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, 1024);
  __shared__ Barriers barriers;
  __shared__ uint32_t address;
  constexpr uint32_t kAllocated = kHow == Tensor::kTooManyColumns ? kColumns + 32 : kColumns;
  const auto warp = static_cast<int>(threadIdx.x) / 32;
  if (threadIdx.x == 0)
    for (int s = 0; s < kStages; ++s) {
      ptx::mbarrier_init(Barriers::at(barriers.full[s]), 32);
      ptx::mbarrier_init(Barriers::at(barriers.empty[s]), 1);
      ptx::mbarrier_init(Barriers::at(barriers.done[s]), 1);
      ptx::mbarrier_init(Barriers::at(barriers.taken[s]), 4);
    }
  if (warp == kMultiplying) {
    if (kHow == Tensor::kAllocatedLate) ptx::tensor_memory_relinquish<1>();
    ptx::tensor_memory_allocate<kAllocated, 1>(ptx::shared_address(&address));  // allocates
    ptx::tensor_memory_relinquish<1>();
  }
  __syncthreads();
  const uint32_t tensor = address;
  const uint32_t shared = ptx::shared_address(memory);
  if (warp < kMultiplying)
    store<kHow>(barriers, tensor, out);
  else if (warp == kMultiplying)
    multiply<kHow>(barriers, shared, tensor);
  else
    produce<kHow>(barriers, memory, a, b);
  if (kHow == Tensor::kFreedInUse) {
    if (warp == kMultiplying) ptx::tensor_memory_free<kColumns, 1>(tensor);  // frees
    return;
  }
  ptx::tcgen05_fence_before_sync();
  __syncthreads();
  if (kHow == Tensor::kNotFreed) return;
  if (warp == (kHow == Tensor::kFreedByAnother ? kProducing : kMultiplying)) {
    ptx::tcgen05_fence_after_sync();
    ptx::tensor_memory_free<kColumns, 1>(tensor);
  }
}

template <Tensor kHow>
void run(float* out, const uint16_t* a, const uint16_t* b) {
  cudaFuncSetAttribute(multiply_tiles<kHow>, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes);
  cuda::launch_kernel("tiles of tcgen05",
                      {.blocks = dim3(1),
                       .threads = (kProducing + 1) * 32,
                       .stream = nullptr,
                       .shared_bytes = kBytes},
                      multiply_tiles<kHow>, out, a, b);
}

}  // namespace

void tensor_tiles(Tensor how, float* out, const uint16_t* a, const uint16_t* b) {
  launch_chosen<Tensor::kEndsUncommitted>(how, [&](auto one) { run<one()>(out, a, b); });
}

}  // namespace tilemoe::simulator_test
