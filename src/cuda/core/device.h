// The current device, what is known once of each, and errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
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

// A value for each device, found when it is first asked for there, by one thread.
template <class Value>
class OncePerDevice {
 public:
  template <class Find>
  const Value& get(int device, const Find& find) {
    const auto slot = static_cast<size_t>(device);
    std::call_once(known_[slot], [&] { values_[slot] = find(); });
    return values_[slot];
  }

 private:
  std::array<Value, kMaxDevices> values_{};
  std::array<std::once_flag, kMaxDevices> known_;
};

struct DeviceInfo {
  int index;
  int multiprocessors;
  int major, minor;  // compute capability
  size_t l2_bytes;
  int shared_bytes;  // that a block may have
  std::string name;

  std::string capability() const { return std::to_string(major) + "." + std::to_string(minor); }
};

// Throws Error(kUnsupported) where no kernel runs on the device: the rowwise ones take compute
// capability 8.0. Products ask for more (cuda/products.h).
void require_any_kernel(const DeviceInfo& device);

// Read once a device. Throws Error(kUnsupported) where there is none that any kernel runs on.
const DeviceInfo& current_device();
// The same of another, as CUDA counts them, without a context on it.
const DeviceInfo& device_at(int index);

}  // namespace tilemoe::cuda
