// What the launches of routing share.
#pragma once

#include <array>
#include <mutex>

#include "cuda/core/device.h"
#include "cuda/core/early_launch.h"

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

}  // namespace tilemoe::cuda
