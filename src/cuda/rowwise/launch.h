// Shared memory of the rowwise kernels beyond the 48 KiB that a kernel has unasked.
#pragma once

#include "cuda/core/device.h"

namespace tilemoe::cuda {

// The most of a block, dynamic and static together, that every GPU from compute capability 8.0 on
// has: 8.6, 8.9 and 12.0 have no more.
constexpr int kMostSharedBytes = 99 * 1024;

// Lets a kernel ask for up to kBytes of dynamic shared memory; once a kernel and device.
template <auto kKernel, int kBytes>
void allow_shared_memory() {
  static_assert(kBytes <= kMostSharedBytes, "no GPU of 99 KiB could run this kernel");
  static OncePerDevice<bool> allowed;
  allowed.get(current_device().index, [] {
    cudaFuncAttributes attributes{};
    TILEMOE_CHECK_CUDA(cudaFuncGetAttributes(&attributes, kKernel), "a kernel's shared memory");
    const size_t all = attributes.sharedSizeBytes + kBytes;
    TILEMOE_ASSERT(all <= kMostSharedBytes, "a rowwise kernel takes "
                                                << all << " bytes of shared memory, at most "
                                                << kMostSharedBytes);
    TILEMOE_CHECK_CUDA(
        cudaFuncSetAttribute(kKernel, cudaFuncAttributeMaxDynamicSharedMemorySize, kBytes),
        kBytes << " bytes of shared memory for routing");
    return true;
  });
}

}  // namespace tilemoe::cuda
