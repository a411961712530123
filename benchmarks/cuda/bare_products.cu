// What the tensor cores give with nothing around the products, by mma.sync and by wgmma, and the
// clock at which they ran: what a kit's steps can be measured against.
//
//   tilemoe_cuda_bare_products [--json FILE]
//
// Tiles of 128 by 256, one block a multiprocessor, bfloat16 numbers of N(0, 1) as operands:
//   mma.sync, registers   each warp multiplies two steps' fragments again and again
//   mma.sync, shared      fragments are read from stages that are filled once, a step ahead
//   wgmma, shared         two warpgroups multiply stages that are filled once
// The first two take turns of 64 x 64 a warp, as the kit sm80 does. Each is timed in a burst of about
// a millisecond after a rest, and for half a second without one, where the GPU's power limit holds.
#include <chrono>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <nlohmann/json.hpp>
#include <string>
#include <thread>

#include "cuda/core/operand.h"
#include "cuda/core/recipe.h"
#include "cuda/ptx/dynamic_shared.h"
#include "cuda/ptx/proxy_fence.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/sm80/mma.h"
#include "cuda/sm80/tiles.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/tiles.h"
#include "device_timing.h"

namespace tilemoe {
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

// Of a block: cycles of its multiprocessor and nanoseconds.
struct Clock {
  long long cycles, ns;
};
__device__ Clock now() {
  Clock at{clock64(), 0};
  asm volatile("mov.u64 %0, %globaltimer;" : "=l"(at.ns));
  return at;
}

// Lets the compiler leave no product out.
template <class Numbers>
__device__ void keep(const Numbers& D, float* out) {
  float sum = 0;
  for (const auto& slab : D)
    for (const float number : slab) sum += number;
  out[blockIdx.x * kThreads + threadIdx.x] = sum;
}

struct Task {
  const uint4* numbers;  // kSharedBytes of them
  int32_t k_blocks;
  float* sums;
  Clock* clocks;
};

template <class Multiply>
__device__ void timed(const Task& task, const Multiply& multiply) {
  const Clock begin = now();
  multiply();
  const Clock end = now();
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
  using Products = cuda::sm80::Mma<WarpShape, A<Major::kK>, B<Major::kK>>;
  const uint32_t shared = cuda::ptx::shared_address(fill_stages(task));
  const Products products;
  typename Products::Fragments fragments[2];
  products.load(fragments[0], shared, 0);
  products.load(fragments[1], shared, 1);
  cuda::sm80::Accumulators<WarpShape> D;
  cuda::sm80::clear<WarpShape>(D);
  timed(task, [&] {
    for (int32_t k_block = 0; k_block < task.k_blocks; ++k_block)
#pragma unroll
      for (int step = 0; step < Products::kSteps; ++step)
        Products::multiply(D, fragments[step % 2]);
  });
  keep(D, task.sums);
}

template <Major kMajorOfB>
__global__ void __launch_bounds__(kThreads, 1) mma_sync_shared(const Task task) {
  using Products = cuda::sm80::Mma<WarpShape, A<Major::kK>, B<kMajorOfB>>;
  const uint32_t shared = cuda::ptx::shared_address(fill_stages(task));
  const Products products;
  typename Products::Fragments fragments[2];
  products.load(fragments[0], shared, 0);
  cuda::sm80::Accumulators<WarpShape> D;
  cuda::sm80::clear<WarpShape>(D);
  timed(task, [&] {
    for (int32_t k_block = 0; k_block < task.k_blocks; ++k_block) {
      const uint32_t stage = shared + k_block % kStages * kStageBytes;
      const uint32_t next = shared + (k_block + 1) % kStages * kStageBytes;
#pragma unroll
      for (int step = 0; step < Products::kSteps; ++step) {
        const bool last = step + 1 == Products::kSteps;
        products.load(fragments[(step + 1) % 2], last ? next : stage, last ? 0 : step + 1);
        Products::multiply(D, fragments[step % 2]);
      }
    }
  });
  keep(D, task.sums);
}

template <Major kMajorOfB>
__global__ void __launch_bounds__(kThreads, 1) wgmma_shared(const Task task) {
#if defined(__CUDA_ARCH_FEAT_SM90_ALL)
  using Products = cuda::sm90::Mma<GroupShape, A<Major::kK>, B<kMajorOfB>>;
  const uint32_t shared = cuda::ptx::shared_address(fill_stages(task));
  const Products products(shared, threadIdx.x / cuda::sm90::kWarpgroup * GroupShape::kRows);
  cuda::sm90::Accumulators<GroupShape> D;
  timed(task, [&] {
    for (int32_t k_block = 0; k_block < task.k_blocks; ++k_block) {
      products.multiply(D, k_block % kStages * kStageBytes, k_block == 0);
      Products::template wait<1>();
    }
    Products::finish(D);
  });
  keep(D, task.sums);
#endif
}

struct Figures {
  double tflops, mhz;
};

class Bench {
 public:
  Bench() {
    int device = 0;
    check_cuda(cudaGetDevice(&device));
    check_cuda(cudaGetDeviceProperties(&properties_, device));
    numbers_.fill(1);
  }

  const char* device() const { return properties_.name; }

  // Of as many k blocks as take a millisecond or so.
  template <class Kernel>
  nlohmann::json of(const char* name, Kernel kernel) const {
    check_cuda(
        cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kSharedBytes));
    run(kernel, 1);  // loads the code
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    const Figures burst = run(kernel, 1);
    constexpr int kLaunches = 500;
    run(kernel, kLaunches);
    const Figures sustained = run(kernel, kLaunches / 5);
    std::printf("%-32s burst %6.1f TFLOP/s at %4.0f MHz, sustained %6.1f at %4.0f\n", name,
                burst.tflops, burst.mhz, sustained.tflops, sustained.mhz);
    std::fflush(stdout);
    const auto figures = [&](const Figures& f) -> nlohmann::json {
      return {{"TFLOP_per_s", f.tflops},
              {"MHz", f.mhz},
              {"multiply_adds_per_cycle",
               f.tflops * 1e12 / 2 / (f.mhz * 1e6) / properties_.multiProcessorCount}};
    };
    return {{"products", name}, {"burst", figures(burst)}, {"sustained", figures(sustained)}};
  }

 private:
  template <class Kernel>
  Figures run(Kernel kernel, int launches) const {
    const int blocks = properties_.multiProcessorCount;
    constexpr int32_t kKBlocks = 800;
    const DeviceBuffer sums(static_cast<size_t>(blocks) * kThreads * sizeof(float));
    const DeviceBuffer clocks(static_cast<size_t>(blocks) * sizeof(Clock));
    cudaEvent_t begin, end;
    check_cuda(cudaEventCreate(&begin));
    check_cuda(cudaEventCreate(&end));
    check_cuda(cudaEventRecord(begin));
    for (int i = 0; i < launches; ++i)
      kernel<<<blocks, kThreads, kSharedBytes>>>({static_cast<const uint4*>(numbers_.data()),
                                                  kKBlocks, static_cast<float*>(sums.data()),
                                                  static_cast<Clock*>(clocks.data())});
    check_cuda(cudaGetLastError());
    check_cuda(cudaEventRecord(end));
    check_cuda(cudaEventSynchronize(end));
    float ms = 0;
    check_cuda(cudaEventElapsedTime(&ms, begin, end));
    check_cuda(cudaEventDestroy(begin));
    check_cuda(cudaEventDestroy(end));
    std::vector<Clock> of_blocks(static_cast<size_t>(blocks));
    check_cuda(cudaMemcpy(of_blocks.data(), clocks.data(), of_blocks.size() * sizeof(Clock),
                          cudaMemcpyDeviceToHost));
    // Of the last launch, by its blocks' own clocks: how fast they multiplied, and at which clock.
    double cycles = 0, ns = 0;
    for (const Clock& clock : of_blocks)
      cycles += static_cast<double>(clock.cycles), ns += static_cast<double>(clock.ns);
    const double flop = 2.0 * kBlockM * kBlockN * 64 * kKBlocks * blocks;
    return {.tflops = flop / (ns / blocks) * 1e-3, .mhz = cycles / ns * 1e3};
  }

  cudaDeviceProp properties_{};
  DeviceBuffer numbers_{kSharedBytes};
};

int main_of(int argc, char** argv) {
  const char* file = argc == 3 && std::strcmp(argv[1], "--json") == 0 ? argv[2] : nullptr;
  if (argc != 1 && file == nullptr) {
    std::fprintf(stderr, "usage: tilemoe_cuda_bare_products [--json FILE]\n");
    return 2;
  }
  const Bench bench;
  std::printf("%s\n", bench.device());
  nlohmann::json found = nlohmann::json::array();
  found.push_back(bench.of("mma.sync, registers", mma_sync_registers));
  found.push_back(bench.of("mma.sync, shared", mma_sync_shared<Major::kK>));
  found.push_back(bench.of("mma.sync, shared, B MN-major", mma_sync_shared<Major::kMN>));
  found.push_back(bench.of("wgmma, shared", wgmma_shared<Major::kK>));
  found.push_back(bench.of("wgmma, shared, B MN-major", wgmma_shared<Major::kMN>));
  if (file == nullptr) return 0;
  std::ofstream out(file);
  out << nlohmann::json{{"device", bench.device()}, {"products", found}}.dump(1) << '\n';
  return out.flush() ? 0 : 1;
}

}  // namespace
}  // namespace tilemoe

int main(int argc, char** argv) {
  try {
    return tilemoe::main_of(argc, argv);
  } catch (const std::exception& error) {
    std::fprintf(stderr, "error: %s\n", error.what());
    return 1;
  }
}
