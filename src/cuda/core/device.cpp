#include "cuda/core/device.h"

#include "cuda/core/device_code.h"

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
          .shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
          .name = properties.name};
}

int count_devices() {
  int count = 0;
  const cudaError_t found = cudaGetDeviceCount(&count);
  if (found != cudaSuccess || count == 0) {
    int driver = 0;
    cudaDriverGetVersion(&driver);  // 0 without a driver
    TILEMOE_CHECK_SUPPORTED(false, why_no_device(found, driver));
  }
  return count;
}

const DeviceInfo& known_device(int index) {
  static OncePerDevice<DeviceInfo> devices;
  TILEMOE_CHECK_SUPPORTED(index < kMaxDevices,
                          "device " << index << ", the library knows " << kMaxDevices);
  const DeviceInfo& device = devices.get(index, [&] { return read(index); });
  require_any_kernel(device);
  require_code(TILEMOE_CUDA_ARCHS, device);
  return device;
}

}  // namespace

void require_any_kernel(const DeviceInfo& device) {
  TILEMOE_CHECK_SUPPORTED(device.major >= 8, device.name << " has compute capability "
                                                         << device.capability()
                                                         << ", the CUDA backend needs 8.0 or newer "
                                                            "(A100): use the CPU backend");
}

const DeviceInfo& current_device() {
  count_devices();
  int index = 0;
  TILEMOE_CHECK_CUDA(cudaGetDevice(&index), "the current device");
  return known_device(index);
}

const DeviceInfo& device_at(int index) {
  const int count = count_devices();
  TILEMOE_CHECK(index >= 0 && index < count,
                "there is no GPU cuda:" << index << ", CUDA counts " << count);
  return known_device(index);
}

}  // namespace tilemoe::cuda
