#include "cuda/core/device.h"

#include <array>
#include <mutex>

namespace tilemoe::cuda {
namespace {

DeviceInfo read(int index) {
  cudaDeviceProp properties{};
  TILEMOE_CHECK_CUDA(cudaGetDeviceProperties(&properties, index), "device " << index);
  return {.index = index,
          .multiprocessors = properties.multiProcessorCount,
          .major = properties.major,
          .minor = properties.minor,
          .l2_bytes = static_cast<size_t>(properties.l2CacheSize),
          .name = properties.name};
}

}  // namespace

const DeviceInfo& current_device() {
  static std::array<DeviceInfo, kMaxDevices> devices;
  static std::array<std::once_flag, kMaxDevices> known;
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  TILEMOE_CHECK_SUPPORTED(found == cudaSuccess && count > 0, "no CUDA device here ("
                                                                 << describe_error(found)
                                                                 << "): use the CPU backend");
  int index = 0;
  TILEMOE_CHECK_CUDA(cudaGetDevice(&index), "the current device");
  TILEMOE_CHECK_SUPPORTED(index < kMaxDevices,
                          "device " << index << ", the library knows " << kMaxDevices);
  const auto slot = static_cast<size_t>(index);
  std::call_once(known[slot], [&] { devices[slot] = read(index); });
  const DeviceInfo& device = devices[slot];
  TILEMOE_CHECK_SUPPORTED(device.major == 9 && device.minor == 0,
                          device.name << " has compute capability " << device.major << "."
                                      << device.minor
                                      << ", the CUDA backend needs 9.0 (H100, H200): use the CPU "
                                         "backend");
  return device;
}

}  // namespace tilemoe::cuda
