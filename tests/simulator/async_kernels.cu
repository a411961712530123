#include <cuda.h>

#include "async_kernels.h"
#include "cuda/core/device.h"
#include "cuda/core/tensor_map.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/descriptors.h"
#include "cuda/ptx/tma.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::simulator_test {
namespace {

namespace ptx = cuda::ptx;

constexpr int kStages = 2, kTileBytes = 64 * 128, kConsumers = 128;
constexpr int kBAt = kStages * kTileBytes, kDAt = kBAt + kTileBytes,
              kBarriersAt = kDAt + kTileBytes;
constexpr int kSharedBytes = kBarriersAt + 64;
static_assert(kSharedBytes <= 48 * 1024, "more requires cudaFuncSetAttribute");

// Number (row, column) of a tile of rows of 128 bytes, swizzled.
__device__ __nv_bfloat16* number_of(uint8_t* tile, int row, int column) {
  return reinterpret_cast<__nv_bfloat16*>(tile + row * 128 + (column / 8 ^ row % 8) * 16 +
                                          column % 8 * 2);
}
constexpr auto multiply = ptx::wgmma<__nv_bfloat16, 64, cuda::Major::kK, cuda::Major::kK>;

struct Params {
  CUtensorMap A;  // (steps * 64, 64), boxes of (64, 64)
  CUtensorMap D;  // (blocks * 64, 64)
  const uint16_t* B;
};

template <Gemm kHow, Cluster kCluster, int kBlocks>
__global__ void multiply_tiles(const __grid_constant__ Params params) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, 1024);
  const uint32_t shared = ptx::shared_address(memory);
  const auto full = [&](int stage) { return shared + kBarriersAt + 8 * stage; };
  const auto empty = [&](int stage) { return shared + kBarriersAt + 8 * (kStages + stage); };
  const auto thread = static_cast<int>(threadIdx.x), rank = static_cast<int>(blockIdx.x) % kBlocks;
  if (thread == 0) {
    for (int stage = 0; stage < kStages; ++stage) {
      ptx::mbarrier_init(full(stage), 1);
      ptx::mbarrier_init(empty(stage), kConsumers / 32 * (rank == 0 ? kBlocks : 1));
    }
    if (kHow != Gemm::kNoInitFence) ptx::fence_mbarrier_init();
  }
  if (kBlocks > 1 && kCluster != Cluster::kNoFirstSync)
    ptx::cluster_sync();
  else
    __syncthreads();

  if (thread >= kConsumers) {
    if (thread > kConsumers) return;
    for (int step = 0; step < kGemmSteps; ++step) {
      const int stage = step % kStages;
      const uint32_t parity = static_cast<uint32_t>(step / kStages) & 1;
      if (kHow != Gemm::kNoEmptyWait && kCluster != Cluster::kNoPeerWait && rank == 0)
        ptx::mbarrier_wait(empty(stage), parity ^ 1);
      // In the other CTA its own barrier says when the next stage may be expected.
      if (rank != 0) ptx::mbarrier_wait(empty(stage), parity ^ 1);
      constexpr int kBytes = kHow == Gemm::kTooFewBytes    ? kTileBytes / 2
                             : kHow == Gemm::kTooManyBytes ? 2 * kTileBytes
                                                           : kTileBytes;
      ptx::mbarrier_arrive_expect_bytes(full(stage), kBytes);
      if (rank != 0) continue;
      const uint32_t to = shared + static_cast<uint32_t>(stage * kTileBytes);
      if constexpr (kBlocks > 1)
        ptx::tma_load_multicast(to, &params.A, full(stage), 3, 0, step * 64, 0);  // loads_both
      else
        ptx::tma_load(to, &params.A, full(stage), 0, step * 64, 0);  // loads
    }
    return;
  }

  for (int i = thread; i < 64 * 64; i += kConsumers)
    *number_of(memory + kBAt, i / 64, i % 64) = __ushort_as_bfloat16(params.B[i]);  // writes_B
  if (kHow != Gemm::kNoOperandFence) ptx::fence_proxy_async();
  ptx::barrier_sync(1, kConsumers);

  float D[32];
  constexpr uint32_t kStride = kHow == Gemm::kWrongStride ? 2048 : 1024;
  const auto release = [&](int stage) {
    if (thread % 32 == 0) ptx::mbarrier_arrive(empty(stage));
    // CTA 0 loads for both.
    if (kBlocks > 1 && rank != 0 && thread % 32 == 1)
      ptx::mbarrier_arrive_cluster(ptx::cluster_address(empty(stage), 0));
  };
  for (int step = 0; step < kGemmSteps; ++step) {
    const int stage = step % kStages;
    if (kHow != Gemm::kNoFullWait)
      ptx::mbarrier_wait(full(stage), static_cast<uint32_t>(step / kStages) & 1);
    if (kHow != Gemm::kNoWgmmaFence) ptx::wgmma_fence();
    for (uint32_t k = 0; k < 4; ++k) {
      const uint32_t stage_at = shared + static_cast<uint32_t>(stage * kTileBytes);
      const uint64_t a = ptx::wgmma_descriptor(stage_at + 32 * k, kStride, 16);
      const uint64_t b = ptx::wgmma_descriptor(shared + kBAt + 32 * k, 1024, 16);
      multiply(D, a, b, step + static_cast<int>(k) > 0);  // multiplies
    }
    ptx::wgmma_commit();
    if (kHow == Gemm::kNoWgmmaWait) {
      release(stage);
      ptx::wgmma_wait<0>();
    } else {
      if (kHow != Gemm::kReadsEarly || step + 1 < kGemmSteps) ptx::wgmma_wait<0>();
      release(stage);
    }
  }

  // Two halves of the rows, one after the other, through the same place.
  const int lane = thread % 32, warp = thread / 32;
  for (int half = 0; half < 2; ++half) {
    if (half == 1) {
      if (kHow != Gemm::kSlotWrittenEarly && thread == 0) ptx::tma_store_wait_read<0>();
      ptx::barrier_sync(1, kConsumers);
    }
    for (int i = 0; i < 32; ++i) {
      const int row = warp * 16 + lane / 4 + 8 * (i % 4 / 2);
      const int column = i / 4 * 8 + lane % 4 * 2 + i % 2;
      if (row / 32 != half) continue;
      *number_of(memory + kDAt, row % 32, column) = __float2bfloat16(D[i]);  // writes_D
    }
    if (kHow != Gemm::kNoStoreFence) ptx::fence_proxy_async();
    if (kHow != Gemm::kNoStoreBarrier) ptx::barrier_sync(1, kConsumers);
    if (thread == 0) {
      const int32_t first_row = static_cast<int32_t>(blockIdx.x) * 64 + half * 32;
      ptx::tma_store(&params.D, shared + kDAt, 0, first_row, 0);  // stores
      ptx::tma_store_commit();
    }
  }
  if (kHow == Gemm::kReadsEarly) ptx::wgmma_wait<0>();
  if (kHow != Gemm::kNoStoreWait && thread == 0) ptx::tma_store_wait();
  if (kBlocks > 1 && kCluster != Cluster::kNoLastSync) ptx::cluster_sync();
}

CUtensorMap map_of(const uint16_t* data, int rows, int box_rows) {
  return cuda::make_tensor_map({.dtype = TILEMOE_BFLOAT16,
                                .data = data,
                                .size = {64, rows, 1},
                                .stride = {64, 64},
                                .box = {64, box_rows, 1}});
}

template <Gemm kHow, Cluster kCluster, int kBlocks>
void run(uint16_t* D, const uint16_t* A, const uint16_t* B) {
  const Params params{
      .A = map_of(A, kGemmSteps * 64, 64), .D = map_of(D, kBlocks * 64, 32), .B = B};
  cudaLaunchAttribute cluster{};
  cluster.id = cudaLaunchAttributeClusterDimension;
  cluster.val.clusterDim = {.x = kBlocks, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(kBlocks);
  config.blockDim = dim3(kConsumers + 32);
  config.dynamicSmemBytes = kSharedBytes;
  config.attrs = &cluster;
  config.numAttrs = 1;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, multiply_tiles<kHow, kCluster, kBlocks>, params),
                     "a GEMM");
}

}  // namespace

void multiply_steps(Gemm how, uint16_t* D, const uint16_t* A, const uint16_t* B) {
#define TILEMOE_CASE(name) \
  case Gemm::name: return run<Gemm::name, Cluster::kRight, 1>(D, A, B)
  switch (how) {
    TILEMOE_CASE(kRight);
    TILEMOE_CASE(kNoInitFence);
    TILEMOE_CASE(kNoFullWait);
    TILEMOE_CASE(kTooFewBytes);
    TILEMOE_CASE(kTooManyBytes);
    TILEMOE_CASE(kNoEmptyWait);
    TILEMOE_CASE(kNoWgmmaWait);
    TILEMOE_CASE(kNoOperandFence);
    TILEMOE_CASE(kNoWgmmaFence);
    TILEMOE_CASE(kReadsEarly);
    TILEMOE_CASE(kWrongStride);
    TILEMOE_CASE(kNoStoreFence);
    TILEMOE_CASE(kNoStoreBarrier);
    TILEMOE_CASE(kNoStoreWait);
    TILEMOE_CASE(kSlotWrittenEarly);
  }
#undef TILEMOE_CASE
}

void multiply_in_cluster(Cluster how, uint16_t* D, const uint16_t* A, const uint16_t* B) {
#define TILEMOE_CASE(name) \
  case Cluster::name: return run<Gemm::kRight, Cluster::name, 2>(D, A, B)
  switch (how) {
    TILEMOE_CASE(kRight);
    TILEMOE_CASE(kNoFirstSync);
    TILEMOE_CASE(kNoLastSync);
    TILEMOE_CASE(kNoPeerWait);
  }
#undef TILEMOE_CASE
}

}  // namespace tilemoe::simulator_test
