
#include "cuda/core/device.h"

#include <algorithm>
#include <charconv>
#include <climits>
#include <cstdlib>
#include <cstring>

#include "core/check.h"

namespace tilemoe::cuda {

namespace {

// Two transfers per clock.
double memory_bytes_per_s(int index) {
  int kilohertz = 0, bits = 0;
  if (cudaDeviceGetAttribute(&kilohertz, cudaDevAttrMemoryClockRate, index) != cudaSuccess ||
      cudaDeviceGetAttribute(&bits, cudaDevAttrGlobalMemoryBusWidth, index) != cudaSuccess)
    return 0;
  return 2e3 * kilohertz * bits / 8;
}

DeviceInfo read(int index) {
  cudaDeviceProp properties{};
  TILEMOE_CHECK_CUDA(cudaGetDeviceProperties(&properties, index), "device " << index);
  return {.index = index,
          .sms = properties.multiProcessorCount,
          .major = properties.major,
          .minor = properties.minor,
          .l2_bytes = static_cast<size_t>(properties.l2CacheSize),
          .shared_bytes = static_cast<int>(properties.sharedMemPerBlockOptin),
          .memory_bytes_per_s = memory_bytes_per_s(index),
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
  TILEMOE_CHECK_SUPPORTED(index < kMaxDevices, "the device index is "
                                                   << index << ", expected a value in [0, "
                                                   << kMaxDevices << ")");
  return devices.get(index, [&] {
    DeviceInfo device = read(index);
    require_any_kernel(device);
    require_code(TILEMOE_CUDA_ARCHS, device);
    return device;
  });
}

}  // namespace

void require_any_kernel(const DeviceInfo& device) {
  TILEMOE_CHECK_SUPPORTED(device.major >= 8, device.name << " has compute capability "
                                                         << device.capability()
                                                         << ", expected 8.0 or newer (A100); use "
                                                            "the CPU backend");
}

const DeviceInfo& current_device() {
  int index = 0;
  if (const cudaError_t found = cudaGetDevice(&index); found != cudaSuccess) {
    count_devices();  // or why no device is found
    TILEMOE_CHECK_CUDA(found, "the current device");
  }
  return known_device(index);
}

const DeviceInfo& device_at(int index) {
  const int count = count_devices();
  TILEMOE_CHECK(index >= 0 && index < count,
                "no GPU cuda:" << index << " found, CUDA reports " << count << " GPUs");
  return known_device(index);
}

bool has_code(std::string_view cuda_archs, const DeviceInfo& device) {
  const auto runs = [&](std::string_view cuda_arch) {
    if (cuda_arch == "80")
      return device.major >= 8;  // with PTX, for devices without code of their own
    if (cuda_arch == "90" || cuda_arch == "90a") return device.major == 9 && device.minor == 0;
    if (cuda_arch == "100" || cuda_arch == "100f") return device.major == 10;
    return cuda_arch == "120" && device.major == 12;
  };
  for (size_t end = 0; !cuda_archs.empty();
       cuda_archs.remove_prefix(std::min(end + 1, cuda_archs.size()))) {
    end = std::min(cuda_archs.find(','), cuda_archs.size());
    if (runs(cuda_archs.substr(0, end))) return true;
  }
  return false;
}

void require_code(std::string_view cuda_archs, const DeviceInfo& device) {
  TILEMOE_CHECK_SUPPORTED(
      has_code(cuda_archs, device),
      device.name << " has compute capability " << device.capability()
                  << ", this build has code for " << cuda_archs
                  << "; rebuild with another TILEMOE_CUDA_ARCHS or use the CPU backend");
}

std::string why_no_device(cudaError_t found, int driver) {
  constexpr int kMajor =
      CUDART_VERSION / 1000;  // a driver of a major version runs all of its minors
  constexpr int kNeededDriver = kMajor == 13 ? 580 : kMajor == 12 ? 525 : 0;
  Text text;
  if (found == cudaErrorInsufficientDriver && driver == 0) {
    text << "no CUDA device found: no NVIDIA driver is installed; install one or use the CPU "
            "backend";
  } else if (found == cudaErrorInsufficientDriver) {
    text << "the NVIDIA driver supports CUDA " << driver / 1000 << "." << driver % 1000 / 10
         << ", this build requires CUDA " << kMajor;
    if (kNeededDriver > 0) text << " (driver " << kNeededDriver << " or newer)";
    text << "; update the driver or use the CPU backend";
  } else if (found == cudaErrorNoDevice || found == cudaSuccess) {
    text << "no CUDA device found: no NVIDIA GPU; use the CPU backend";
  } else {
    text << "no CUDA device found (" << describe_error(found) << "); use the CPU backend";
  }
  return text.str();
}

}  // namespace tilemoe::cuda

namespace tilemoe::cuda::sm80 {

namespace {

// INT_MAX: not set.
int requested_shared_kib() {
  const char* const text = std::getenv("TILEMOE_SHARED_KIB");
  if (text == nullptr || *text == '\0') return INT_MAX;
  int kib = 0;
  const char* const end = text + std::strlen(text);
  const auto read = std::from_chars(text, end, kib);
  TILEMOE_CHECK(read.ec == std::errc() && read.ptr == end && kib >= 99 && kib <= 227,
                "TILEMOE_SHARED_KIB is '" << text << "', expected KiB in [99, 227]");
  return kib;
}

}  // namespace

int shared_bytes_of_block(const DeviceInfo& device) {
  static const int kib = requested_shared_kib();  // read once
  return kib == INT_MAX ? device.shared_bytes : std::min(device.shared_bytes, kib * 1024);
}

}  // namespace tilemoe::cuda::sm80
