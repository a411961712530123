// Starts a grouped GEMM: one block an SM, each working through its share of the tiles,
// or as many as take turns there. Two SMs stand so close together that clusters of two
// leave none idle.
#pragma once

#include <algorithm>

#include "core/backend.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/gemm/sm90.h"

namespace tilemoe::cuda::sm90 {

// `max_tiles` is known on the host: idle blocks are not started for tiny problems.
template <class Gemm>
void launch(const typename Gemm::Params& params, int64_t max_tiles, void* stream,
            const Tuning& tuning) {
  const DeviceInfo& device = current_device();
  const auto kernel = grouped_gemm<Gemm>;
  static OncePerDevice<bool> allowed;
  allowed.get(device.index, [&] {
    TILEMOE_CHECK_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                            Gemm::kSharedBytesUsed),
                       Gemm::kSharedBytesUsed << " bytes of shared memory for a grouped GEMM");
    return true;
  });
  constexpr int kCluster = Gemm::Shape::kCluster;
  const int64_t clusters = std::max<int64_t>(1, device.sms / kCluster) * tuning.ctas_per_sm;
  const int64_t blocks = std::min(clusters, max_tiles) * kCluster;
  cudaLaunchAttribute attributes[2] = {pdl_attribute(tuning.pdl), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = kCluster, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(static_cast<unsigned>(blocks));
  config.blockDim = dim3(kBlockThreads);
  config.dynamicSmemBytes = Gemm::kSharedBytesUsed;
  config.attrs = attributes;
  config.numAttrs = kCluster > 1 ? 2 : 1;
  config.stream = static_cast<cudaStream_t>(stream);
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params),
                     "grouped GEMM of " << blocks << " blocks");
}

}  // namespace tilemoe::cuda::sm90
