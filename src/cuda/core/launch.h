// Launches of kernels, with PDL (programmatic dependent launch): a kernel starts while the previous
// kernel of the stream ends. Its instructions exist from compute capability 9.0 on. Code for less
// has no wait and would read its data too early, so PDL is used only if the code of the kernel can
// wait.
#pragma once

#include <algorithm>
#include <utility>

#include "cuda/core/device.h"

namespace tilemoe::cuda {

// Before this wait a kernel reads nothing that the previous kernel writes, and writes nothing that
// it reads. A thread of every kernel launched with PDL waits, so that none ends before its
// predecessor.
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

// The begin of every kernel that is launched with PDL, unless the kernel does both separately.
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

// Whether the kernel's code on the device, the current one, was compiled for 9.0 or more. The device does not
// decide it: on Hopper the code may be PTX for 8.0 that the driver compiled (CUDA_FORCE_PTX_JIT=1).
template <auto kKernel>
bool supports_pdl(const DeviceInfo& device) {
  static OncePerDevice<bool> known;
  return known.get(device.index, [] {
    cudaFuncAttributes attributes{};
    TILEMOE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kKernel), "what a kernel was made for");
    return std::min(attributes.binaryVersion, attributes.ptxVersion) >= 90;
  });
}

struct PdlLaunch {
  const DeviceInfo& device;  // the current one
  dim3 blocks;
  int threads;
  cudaStream_t stream;
  int shared_bytes = 0;
  bool pdl = true;       // not where this is false
  unsigned cluster = 1;  // CTAs of a cluster
};

template <auto kKernel, class Params>
void launch_pdl(const PdlLaunch& where, const Params& params) {
  cudaLaunchAttribute attributes[2] = {
      pdl_attribute(where.pdl && supports_pdl<kKernel>(where.device)), {}};
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

// Launches a kernel and returns the error of this launch only. <<<>>> with cudaGetLastError() would
// report, and clear, an error that the caller has pending; cudaLaunchKernelEx returns its own. (If
// an earlier kernel broke the context, every call returns that error.)

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
