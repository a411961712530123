// Starts a grouped GEMM: one block an SM, each working through its share of the tiles, or
// as many as take turns there. Blocks that multiply together are a cluster.
#pragma once

#include <algorithm>
#include <cstdint>

#include "core/backend.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/sm100.h"

namespace tilemoe::cuda::sm100 {

// `max_tiles` is known on the host: idle blocks are not started for tiny problems.
template <class Gemm>
void launch(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
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
  const int64_t at_once = int64_t{device.sms} * tuning.ctas_per_sm / kTogether;
  const int64_t blocks = std::min(std::max<int64_t>(at_once, 1), max_tiles) * kTogether;
  launch_pdl<kKernel>({.blocks = dim3(static_cast<unsigned>(blocks)),
                       .threads = kBlockThreads,
                       .stream = static_cast<cudaStream_t>(stream),
                       .shared_bytes = Gemm::kSharedBytesUsed,
                       .pdl = tuning.pdl,
                       .cluster = Gemm::Shape::kCtas},
                      params);
}

}  // namespace tilemoe::cuda::sm100
