// Starts a kernel, and answers with the error of this launch alone. <<<>>> with cudaGetLastError()
// would take an error for ours that the caller has pending, and clear it; cudaLaunchKernelEx
// returns its own. (Where an earlier kernel broke the context, every call returns that.)
#pragma once

#include <utility>

#include "cuda/core/device.h"

namespace tilemoe::cuda {

struct KernelLaunch {
  dim3 blocks;
  int threads;
  cudaStream_t stream;
  int64_t shared_bytes = 0;
};

// `what` the kernel does stands in the error.
template <class... Params, class... Args>
void launch_kernel(const char* what, const KernelLaunch& where, void (*kernel)(Params...),
                   Args&&... args) {
  cudaLaunchConfig_t config{};
  config.gridDim = where.blocks;
  config.blockDim = dim3(static_cast<unsigned>(where.threads));
  config.dynamicSmemBytes = static_cast<size_t>(where.shared_bytes);
  config.stream = where.stream;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, std::forward<Args>(args)...),
                     what << ", " << where.blocks.x << " by " << where.blocks.y << " blocks");
}

}  // namespace tilemoe::cuda
