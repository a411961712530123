// Programmatic dependent launch: a kernel starts while the one before it in the stream ends. The
// instructions for it exist from compute capability 9.0 on. Code for less has none and would run
// ahead of its data, so a kernel is started early only where its own code can wait.
#pragma once

#include <algorithm>
#include <utility>

#include "cuda/core/device.h"

namespace tilemoe::cuda {

// Nothing that the kernel before writes is read, and nothing that it reads written, before this.
// Some thread of every kernel that is started early waits, so that none ends before its predecessor.
__device__ __forceinline__ void pdl_wait() {
#if __CUDA_ARCH__ >= 900
  cudaGridDependencySynchronize();
#endif
}

// The next kernel may start; it sees what this one wrote once it waited.
__device__ __forceinline__ void pdl_trigger() {
#if __CUDA_ARCH__ >= 900
  cudaTriggerProgrammaticLaunchCompletion();
#endif
}

// Begins every kernel that is started early, unless it does both by itself.
__device__ __forceinline__ void wait_for_previous() {
  pdl_wait();
  pdl_trigger();
}

inline cudaLaunchAttribute pdl_attribute(bool allowed) {
  cudaLaunchAttribute attribute{};
  attribute.id = cudaLaunchAttributeProgrammaticStreamSerialization;
  attribute.val.programmaticStreamSerializationAllowed = allowed ? 1 : 0;
  return attribute;
}

// Whether the kernel's code on the current device was compiled for 9.0 or more. The device does not
// tell: on Hopper it may be PTX for 8.0, which the driver compiled there (CUDA_FORCE_PTX_JIT=1).
template <auto kKernel>
bool supports_pdl() {
  static OncePerDevice<bool> known;
  return known.get(current_device().index, [] {
    cudaFuncAttributes attributes{};
    TILEMOE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kKernel), "what a kernel was made for");
    return std::min(attributes.binaryVersion, attributes.ptxVersion) >= 90;
  });
}

struct PdlLaunch {
  dim3 blocks;
  int threads;
  cudaStream_t stream;
  int shared_bytes = 0;
  bool pdl = true;       // not where this is false
  unsigned cluster = 1;  // blocks of one
};

template <auto kKernel, class Params>
void launch_pdl(const PdlLaunch& where, const Params& params) {
  cudaLaunchAttribute attributes[2] = {pdl_attribute(where.pdl && supports_pdl<kKernel>()), {}};
  attributes[1].id = cudaLaunchAttributeClusterDimension;
  attributes[1].val.clusterDim = {.x = where.cluster, .y = 1, .z = 1};
  cudaLaunchConfig_t config{};
  config.gridDim = where.blocks;
  config.blockDim = dim3(static_cast<unsigned>(where.threads));
  config.dynamicSmemBytes = static_cast<size_t>(where.shared_bytes);
  config.stream = where.stream;
  config.attrs = attributes;
  config.numAttrs = where.cluster > 1 ? 2 : 1;
  TILEMOE_CHECK_CUDA(cudaLaunchKernelEx(&config, kKernel, params),
                     "a kernel of " << where.blocks.x << " by " << where.blocks.y << " blocks");
}

// Starts a kernel, and answers with the error of this launch alone. <<<>>> with cudaGetLastError()
// would take an error for ours that the caller has pending, and clear it; cudaLaunchKernelEx
// returns its own. (Where an earlier kernel broke the context, every call returns that.)

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
