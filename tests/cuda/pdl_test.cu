// Kernels are launched with PDL if and only if their code can wait; none runs ahead of its data.
// With CUDA_FORCE_PTX_JIT=1 the driver compiles the PTX for 8.0, which has no instruction to wait.
#include <gtest/gtest.h>

#include <cstdlib>
#include <string>
#include <vector>

#include "cuda/core/launch.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kBlocks = 400;  // more than a GPU starts at once
constexpr int kNumbers = kThreads * kBlocks;

struct RoundParams {
  const int32_t* from;  // (kNumbers) all of them `round`
  int32_t* to;          // (kNumbers) becomes round + 1
  int32_t* wrong;       // how many were something else
  int32_t round;
};

// Reads what the other end of the previous grid wrote late.
__global__ void __launch_bounds__(kThreads) next_round(const RoundParams params) {
  wait_for_previous();
  const int place = static_cast<int>(blockIdx.x) * kThreads + static_cast<int>(threadIdx.x);
  if (params.from[kNumbers - 1 - place] != params.round) atomicAdd(params.wrong, 1);
  const long long begin = clock64();
  while (clock64() - begin < 3000) continue;
  params.to[place] = params.round + 1;
}

bool from_ptx() {
  const char* forced = std::getenv("CUDA_FORCE_PTX_JIT");
  return forced != nullptr && std::string(forced) == "1";
}

TEST(Pdl, IsUsedForKernelsThatCanWait) {
  const DeviceInfo& device = current_device();
  const bool hopper = device.major == 9 && device.minor == 0;
  cudaFuncAttributes attributes{};
  TILEMOE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, next_round), "the kernel");
  EXPECT_EQ(attributes.ptxVersion, hopper && !from_ptx() ? 90 : 80);
  EXPECT_EQ(supports_pdl<next_round>(device), hopper && !from_ptx())
      << "binary " << attributes.binaryVersion << ", PTX " << attributes.ptxVersion;
}

TEST(Pdl, NeverRunsAheadOfItsData) {
  constexpr int kRounds = 2000;
  int32_t *numbers[2] = {}, *wrong = nullptr;
  for (int32_t*& each : numbers) {
    TILEMOE_CHECK_CUDA(cudaMalloc(&each, kNumbers * sizeof(int32_t)), "numbers");
    TILEMOE_CHECK_CUDA(cudaMemset(each, 0, kNumbers * sizeof(int32_t)), "numbers");
  }
  TILEMOE_CHECK_CUDA(cudaMalloc(&wrong, sizeof(int32_t)), "a count");
  TILEMOE_CHECK_CUDA(cudaMemset(wrong, 0, sizeof(int32_t)), "a count");
  cudaStream_t stream = nullptr;
  TILEMOE_CHECK_CUDA(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking), "a stream");
  TILEMOE_CHECK_CUDA(cudaDeviceSynchronize(), "zeros");
  for (int round = 0; round < kRounds; ++round)
    launch_pdl<next_round>(
        {.device = current_device(), .blocks = kBlocks, .threads = kThreads, .stream = stream},
        RoundParams{numbers[round % 2], numbers[(round + 1) % 2], wrong, round});
  TILEMOE_CHECK_CUDA(cudaStreamSynchronize(stream), "rounds");
  int32_t found = -1;
  std::vector<int32_t> last(kNumbers);
  TILEMOE_CHECK_CUDA(cudaMemcpy(&found, wrong, sizeof found, cudaMemcpyDeviceToHost), "a count");
  TILEMOE_CHECK_CUDA(cudaMemcpy(last.data(), numbers[kRounds % 2], kNumbers * sizeof(int32_t),
                                cudaMemcpyDeviceToHost),
                     "numbers");
  EXPECT_EQ(found, 0);
  EXPECT_EQ(last, std::vector<int32_t>(kNumbers, kRounds));
  for (int32_t* each : {numbers[0], numbers[1], wrong}) cudaFree(each);
  cudaStreamDestroy(stream);
}

}  // namespace
}  // namespace tilemoe::cuda
