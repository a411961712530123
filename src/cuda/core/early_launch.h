// Programmatic dependent launch: a kernel starts while the one before it in the stream ends.
#pragma once

#include "cuda/core/device.h"

namespace tilemoe::cuda {

// Begins every kernel that is started so, before it touches what the one before it reads or writes,
// and lets the next one start. Some thread of each waits, so that none ends before its predecessor.
__device__ __forceinline__ void wait_for_previous() {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

inline cudaLaunchAttribute early_launch(bool allowed) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = allowed ? 1 : 0;
  return attribute;
}

template <class Params>
void launch_early(void (*kernel)(Params), dim3 blocks, int threads, int shared_bytes,
                  cudaStream_t stream, const Params& params, bool allowed = true) {
  cudaLaunchAttribute early = early_launch(allowed);
  cudaLaunchConfig_t config{};
  config.gridDim = blocks;
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params),
                     "a kernel of " << blocks.x << " by " << blocks.y << " blocks");
}

}  // namespace tilemoe::cuda
