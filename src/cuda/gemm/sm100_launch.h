// Starts a grouped GEMM: one block a multiprocessor, each working through its share of the tiles, or
// as many as take turns there. Blocks that multiply together are a cluster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/sm100.h"

namespace tilemoe::cuda::sm100 {

// `tiles_at_most` is known on the host: idle blocks are not started for tiny problems.
template <class Gemm>
void launch(const typename Gemm::Params& params, int64_t tiles_at_most, void* stream,
            const Tuning& tuning) {
  constexpr auto kKernel = grouped_gemm<Gemm>;
  constexpr int64_t kTogether = Gemm::Order::kTogether;
  const DeviceInfo& device = current_device();
  static OncePerDevice<bool> allowed;
  allowed.get(device.index, [] {
    TILEMOE_CHECK_CUDA(cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            Gemm::kSharedBytesUsed),
                       Gemm::kSharedBytesUsed << " bytes of shared memory for a grouped GEMM");
    return true;
  });
  const int64_t at_once = int64_t{device.multiprocessors} * tuning.block_turns / kTogether;
  const int64_t blocks = std::min(std::max<int64_t>(at_once, 1), tiles_at_most) * kTogether;
  launch_early<kKernel>({.blocks = dim3(static_cast<unsigned>(blocks)),
                         .threads = kBlockThreads,
                         .stream = static_cast<cudaStream_t>(stream),
                         .shared_bytes = Gemm::kSharedBytesUsed,
                         .early = tuning.early,
                         .cluster = Gemm::Shape::kBlocks},
                        params);
}

}  // namespace tilemoe::cuda::sm100
