// The current device, what is known once of each, and errors of the CUDA runtime as exceptions.
#pragma once

#include <cuda_runtime_api.h>

#include <array>
#include <mutex>
#include <string>
#include <string_view>

#include "core/check.h"

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
  int sms;
  int major, minor;  // compute capability
  size_t l2_bytes;
  int shared_bytes;  // that a block may have
  std::string name;

  std::string capability() const { return std::to_string(major) + "." + std::to_string(minor); }
};

// Throws Error(kUnsupported) where no kernel runs on the device: the row-wise ones take compute
// capability 8.0. Products ask for more (cuda/products.h).
void require_any_kernel(const DeviceInfo& device);

// Read once a device. Throws Error(kUnsupported) where there is none that any kernel runs on.
const DeviceInfo& current_device();
// The same of another, as CUDA counts them, without a context on it.
const DeviceInfo& device_at(int index);

// Whether this machine's devices run what a build has, and what to say where they do not. Host code
// alone: kernels include device.h.

// Whether code for these architectures, "80,90a" as in TILEMOE_CUDA_ARCHS, runs on the device.
bool has_code(std::string_view cuda_archs, const DeviceInfo& device);
// Throws Error(kUnsupported) where it does not.
void require_code(std::string_view cuda_archs, const DeviceInfo& device);

// What to say where asking for the devices gave `found`, with a driver of that version (as
// cudaDriverGetVersion has it: 12040; 0 where there is none).
std::string why_no_device(cudaError_t found, int driver);

}  // namespace tilemoe::cuda

namespace tilemoe::cuda::sm80 {

// How an SM's shared memory is used: GPUs of one arch have 99, 163 or 227 KiB of it for a
// block.

// Blocks of an SM at a time, and the stages of each.
struct BlockRoom {
  int blocks, stages;
  bool operator==(const BlockRoom&) const = default;
};

// As many blocks as may be wanted that have two stages each, and as many stages as these have room
// for, at most those wanted. `block_bytes` are what one block may have. No stages: no room.
constexpr BlockRoom block_room(int block_bytes, int stage_bytes, int other_bytes,
                               const BlockRoom& wanted) {
  constexpr int kOfTheSystem = 1024;  // of each block; all blocks share what one has with it
  for (int blocks = wanted.blocks; blocks > 0; --blocks) {
    const int own = (block_bytes + kOfTheSystem) / blocks - kOfTheSystem;
    const int stages = (own - other_bytes) / stage_bytes;
    if (stages >= 2) return {blocks, stages < wanted.stages ? stages : wanted.stages};
  }
  return {};
}

// What a block may have on the device; at most TILEMOE_SHARED_KIB, where that is set: with it, a
// GPU runs the code of one that has less.
int shared_bytes_of_block(const DeviceInfo& device);

}  // namespace tilemoe::cuda::sm80
