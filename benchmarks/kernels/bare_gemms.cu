// GEMMs with nothing around them: tiles of 128 by 256, one CTA per SM, bfloat16 numbers of N(0, 1).
//   mma.sync, registers   each warp multiplies two steps' fragments again and again
//   mma.sync, shared      fragments are read from stages that are filled once, a step ahead
//   wgmma, shared         two warpgroups multiply stages that are filled once
// The first two interleave 64 x 64 per warp, as the arch sm80 does. Each is timed in a burst of a
// millisecond after a rest, and for half a second without one, when the GPU's power limit holds.
#include <chrono>
#include <cstdio>
#include <string>
#include <thread>

#include "cuda/core/recipe.h"
#include "cuda/device.h"  // of apps/tilemoe
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/sm80.h"
#include "cuda/gemm/sm90.h"
#include "cuda/ops/table.h"
#include "cuda/ptx/address.h"
#include "cuda/ptx/barriers.h"
#include "cuda/ptx/descriptors.h"
#include "cuda/ptx/warp.h"
#include "modes.h"
#include "timed_layer.h"

namespace tilemoe::app {
namespace {

using cuda::Major;
using cuda::StagedOperand;
using Recipe = cuda::RecipeOf<cuda::RecipeName::kBF16>::type;
using WarpShape = cuda::sm80::TileShape<Recipe, cuda::kWarps256>;
using GroupShape = cuda::sm90::TileShape<Recipe, cuda::kCooperative256>;
constexpr int kThreads = 256;
constexpr int kStages = 4;
constexpr int kBlockM = 128, kBlockN = 256;
static_assert(WarpShape::kThreads == kThreads);

template <Major kMajor>
using A = StagedOperand<kMajor, kBlockM>;
template <Major kMajor>
using B = StagedOperand<kMajor, kBlockN>;
constexpr int kStageBytes = A<Major::kK>::kBytes + B<Major::kK>::kBytes;
constexpr int kSharedBytes = kStages * kStageBytes;

// The times of a CTA: cycles of its SM, and nanoseconds.
struct Clocks {
  long long cycles, ns;
};
__device__ Clocks now() {
  Clocks at{clock64(), 0};
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(at.ns));
  return at;
}

// Keeps the compiler from removing a multiplication.
template <class Numbers>
__device__ void keep(const Numbers& D, float* out) {
  float sum = 0;
  for (const auto& fragment : D)
    for (const float number : fragment) sum += number;
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

struct Task {
  const uint4* numbers;  // kSharedBytes of them
  int32_t k_blocks;
  float* sums;
  Clocks* clocks;
};

template <class Multiply>
__device__ void timed(const Task& task, const Multiply& multiply) {
  const Clocks begin = now();
  multiply();
  const Clocks end = now();
  if (threadIdx.x == 0) task.clocks[blockIdx.x] = {end.cycles - begin.cycles, end.ns - begin.ns};
}

__device__ uint8_t* fill_stages(const Task& task) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, 1024);
  for (int i = static_cast<int>(threadIdx.x); i < kSharedBytes / 16; i += kThreads)
    reinterpret_cast<uint4*>(memory)[i] = task.numbers[i];
  cuda::ptx::fence_proxy_async();
  __syncthreads();
  return memory;
}

__global__ void __launch_bounds__(kThreads, 1) mma_sync_registers(const Task task) {
  using Mma = cuda::sm80::Mma<WarpShape, A<Major::kK>, B<Major::kK>>;
  const uint32_t shared = cuda::ptx::shared_address(fill_stages(task));
  const Mma mma;
  typename Mma::Fragments fragments[2];
  mma.load(fragments[0], shared, 0);
  mma.load(fragments[1], shared, 1);
  cuda::sm80::Accumulators<WarpShape> D;
  cuda::sm80::clear<WarpShape>(D);
  timed(task, [&] {
    for (int32_t k_block = 0; k_block < task.k_blocks; ++k_block)
#pragma unroll
      for (int step = 0; step < Mma::kSteps; ++step) Mma::multiply(D, fragments[step % 2]);
  });
  keep(D, task.sums);
}

template <Major kMajorOfB>
__global__ void __launch_bounds__(kThreads, 1) mma_sync_shared(const Task task) {
  using Mma = cuda::sm80::Mma<WarpShape, A<Major::kK>, B<kMajorOfB>>;
  const uint32_t shared = cuda::ptx::shared_address(fill_stages(task));
  const Mma mma;
  typename Mma::Fragments fragments[2];
  mma.load(fragments[0], shared, 0);
  cuda::sm80::Accumulators<WarpShape> D;
  cuda::sm80::clear<WarpShape>(D);
  timed(task, [&] {
    for (int32_t k_block = 0; k_block < task.k_blocks; ++k_block) {
      const uint32_t stage = shared + k_block % kStages * kStageBytes;
      const uint32_t next = shared + (k_block + 1) % kStages * kStageBytes;
#pragma unroll
      for (int step = 0; step < Mma::kSteps; ++step) {
        const bool last = step + 1 == Mma::kSteps;
        mma.load(fragments[(step + 1) % 2], last ? next : stage, last ? 0 : step + 1);
        Mma::multiply(D, fragments[step % 2]);
      }
    }
  });
  keep(D, task.sums);
}

template <Major kMajorOfB>
__global__ void __launch_bounds__(kThreads, 1) wgmma_shared(const Task task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Mma = cuda::sm90::Mma<GroupShape, A<Major::kK>, B<kMajorOfB>>;
  const uint32_t shared = cuda::ptx::shared_address(fill_stages(task));
  const Mma mma(shared, threadIdx.x / cuda::sm90::kWarpgroup * GroupShape::kRows);
  cuda::sm90::Accumulators<GroupShape> D;
  timed(task, [&] {
    for (int32_t k_block = 0; k_block < task.k_blocks; ++k_block) {
      mma.multiply(D, k_block % kStages * kStageBytes, k_block == 0, Mma::kSteps);
      Mma::template wait<1>();
    }
    Mma::finish(D);
  });
  keep(D, task.sums);
#endif
}

struct Rate {
  double tflops, mhz;
};

template <class Kernel>
Rate rate_of(Kernel kernel, const DeviceBuffer& numbers, int ctas, int launches) {
  constexpr int32_t kKBlocks = 800;  // about a millisecond
  const DeviceBuffer sums(static_cast<size_t>(ctas) * kThreads * sizeof(float));
  const DeviceBuffer clocks(static_cast<size_t>(ctas) * sizeof(Clocks));
  for (int i = 0; i < launches; ++i)
    kernel<<<ctas, kThreads, kSharedBytes>>>({static_cast<const uint4*>(numbers.data()), kKBlocks,
                                              static_cast<float*>(sums.data()),
                                              static_cast<Clocks*>(clocks.data())});
  check_cuda(cudaGetLastError(), "a bare GEMM");
  // The speed and the clock of the last launch, by its CTAs' own clocks.
  std::vector<Clocks> of_ctas(static_cast<size_t>(ctas));
  clocks.read(of_ctas.data(), of_ctas.size() * sizeof(Clocks));
  double cycles = 0, ns = 0;
  for (const Clocks& one : of_ctas)
    cycles += static_cast<double>(one.cycles), ns += static_cast<double>(one.ns);
  const double flop = 2.0 * kBlockM * kBlockN * 64 * kKBlocks * ctas;
  return {.tflops = flop / (ns / ctas) * 1e-3, .mhz = cycles / ns * 1e3};
}

template <class Kernel>
void time_kernel(const char* name, Kernel kernel, const DeviceBuffer& numbers, Report& report) {
  constexpr int kLaunches = 500;
  int device = 0, ctas = 0;
  check_cuda(cudaGetDevice(&device), "cudaGetDevice");
  check_cuda(cudaDeviceGetAttribute(&ctas, cudaDevAttrMultiProcessorCount, device), "its SMs");
  check_cuda(
      cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes),
      "the shared memory of a bare GEMM");
  rate_of(kernel, numbers, ctas, 1);  // loads the code
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  const Rate burst = rate_of(kernel, numbers, ctas, 1);
  rate_of(kernel, numbers, ctas, kLaunches);
  const Rate sustained = rate_of(kernel, numbers, ctas, kLaunches / 5);
  std::printf("%-32s burst %6.1f TFLOP/s at %4.0f MHz, sustained %6.1f at %4.0f\n", name,
              burst.tflops, burst.mhz, sustained.tflops, sustained.mhz);
  std::fflush(stdout);
  Values values;
  for (const auto& [what, rate] : {std::pair("burst", burst), std::pair("sustained", sustained)}) {
    const std::string prefix = what;
    values[prefix + "_tflop_per_s"] = rate.tflops;
    values[prefix + "_mhz"] = rate.mhz;
    values[prefix + "_fma_per_cycle_and_sm"] = rate.tflops * 1e6 / 2 / rate.mhz / ctas;
  }
  report.add(std::string("gemm/bare/") + name, std::move(values));
}

}  // namespace

void time_bare_gemms(Report& report) {
  const DeviceBuffer numbers(kSharedBytes);
  fill_normal(verify::cuda_memory(), Tensor(numbers.data(), DType::kBFloat16, {kSharedBytes / 2}),
              1, 1);
  time_kernel("mma.sync, registers", mma_sync_registers, numbers, report);
  time_kernel("mma.sync, shared", mma_sync_shared<Major::kK>, numbers, report);
  time_kernel("mma.sync, shared, B MN-major", mma_sync_shared<Major::kMN>, numbers, report);
  time_kernel("wgmma, shared", wgmma_shared<Major::kK>, numbers, report);
  time_kernel("wgmma, shared, B MN-major", wgmma_shared<Major::kMN>, numbers, report);
}

}  // namespace tilemoe::app
