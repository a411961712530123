// Devices: their properties, read once per device; whether they run the code of a build; shared
// memory; and errors of the CUDA runtime as exceptions.
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

// One value per device, computed by one thread at the first use on that device.
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
  int shared_bytes;           // maximum of a CTA
  double memory_bytes_per_s;  // of the specification, 0 if unknown
  std::string name;

  std::string capability() const { return std::to_string(major) + "." + std::to_string(minor); }
};

// Throws Error(kUnsupported) if no kernel runs on the device: kernels without a GEMM require
// compute capability 8.0. GEMMs require an arch that runs on the device (cuda/arch.h).
void require_any_kernel(const DeviceInfo& device);

// Read once per device. Throws Error(kUnsupported) if no kernel runs on the device.
const DeviceInfo& current_device();
// The same of another, as CUDA counts them, without a context on it.
const DeviceInfo& device_at(int index);

// ---- whether the devices of this machine run the code of a build, and the errors if not

// Whether code for these architectures, "80,90a" as in TILEMOE_CUDA_ARCHS, runs on the device.
bool has_code(std::string_view cuda_archs, const DeviceInfo& device);
// Throws Error(kUnsupported) if it does not.
void require_code(std::string_view cuda_archs, const DeviceInfo& device);

// What to say where asking for the devices gave `found`, with a driver of that version (as
// cudaDriverGetVersion has it: 12040; 0 without a driver).
std::string why_no_device(cudaError_t found, int driver);

}  // namespace tilemoe::cuda

namespace tilemoe::cuda::sm80 {

// ---- shared memory of an SM: GPUs of one arch have 99, 163 or 227 KiB for a CTA

// CTAs per SM, and the stages of each.
struct BlockRoom {
  int blocks, stages;
  bool operator==(const BlockRoom&) const = default;
};

// The wanted number of CTAs, or as many as have room for two stages each; and the wanted number of
// stages, or as many as fit. `block_bytes` is the maximum of one CTA. No stages: no room.
constexpr BlockRoom block_room(int block_bytes, int stage_bytes, int other_bytes,
                               const BlockRoom& wanted) {
  constexpr int kOfTheSystem = 1024;  // of each CTA; all CTAs share the maximum of one plus this
  for (int blocks = wanted.blocks; blocks > 0; --blocks) {
    const int own = (block_bytes + kOfTheSystem) / blocks - kOfTheSystem;
    const int stages = (own - other_bytes) / stage_bytes;
    if (stages >= 2) return {blocks, stages < wanted.stages ? stages : wanted.stages};
  }
  return {};
}

// Shared memory available to a CTA on the device; at most TILEMOE_SHARED_KIB, where that is set: with it, a
// GPU runs the code of one that has less.
int shared_bytes_of_block(const DeviceInfo& device);

}  // namespace tilemoe::cuda::sm80
