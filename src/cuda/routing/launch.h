// What the launches of routing share.
#pragma once

#include <array>
#include <mutex>

#include "cuda/device.h"

namespace tilemoe::cuda {

// Lets a kernel ask for more than 48 KiB of dynamic shared memory; once a kernel and device.
template <auto kKernel>
void allow_shared_memory(int bytes) {
  static std::array<std::once_flag, kMaxDevices> allowed;
  std::call_once(allowed[static_cast<size_t>(current_device().index)], [bytes] {
    TILEMOE_CHECK_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, bytes),
        bytes << " bytes of shared memory for routing");
  });
}

// Begins every kernel that starts while the one before it ends, and lets the next one start.
__device__ __forceinline__ void wait_for_previous() {
  cudaGridDependencySynchronize();
  cudaTriggerProgrammaticLaunchCompletion();
}

// Starts a kernel while the one before it in the stream ends: the kernel itself waits, by
// cudaGridDependencySynchronize, before it touches what that one reads or writes.
template <class Params>
void launch_early(void (*kernel)(Params), unsigned blocks, int threads, int shared_bytes,
                  cudaStream_t stream, const Params& params) {
  cudaLaunchAttribute early{};
  early.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  early.val.programmaticStreamSerializationAllowed = 1;
  cudaLaunchConfig_t config{};
  config.gridDim = dim3(blocks);
  config.blockDim = dim3(static_cast<unsigned>(threads));
  config.dynamicSmemBytes = static_cast<size_t>(shared_bytes);
  config.stream = stream;
  config.attrs = &early;
  config.numAttrs = 1;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, kernel, params),
                     "routing in " << blocks << " blocks");
}

}  // namespace tilemoe::cuda
