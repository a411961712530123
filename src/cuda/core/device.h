// The current device, and errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <string>

#include "check.h"

namespace tilemoe::cuda {

inline std::string describe_error(cudaError_t error) {
  return std::string(cudaGetErrorName(error)) + ": " + cudaGetErrorString(error);
}

// TILEMOE_CHECK_CUDA(cudaGetDevice(&device), "no device");
#define TILEMOE_CHECK_CUDA(call, message)                                                     \
  do {                                                                                        \
    const cudaError_t tilemoe_cuda_error = (call);                                            \
    TILEMOE_CHECK_AS(::tilemoe::Status::kDeviceError, tilemoe_cuda_error == cudaSuccess,      \
                     message << ": " << ::tilemoe::cuda::describe_error(tilemoe_cuda_error)); \
  } while (false)

constexpr int kMaxDevices = 64;

struct DeviceInfo {
  int index;
  int multiprocessors;
  int major, minor;  // compute capability
  size_t l2_bytes;
  std::string name;
};

// Read once a device. Throws Error(kUnsupported) where there is none that the kernels run on.
const DeviceInfo& current_device();

}  // namespace tilemoe::cuda
