#include "cuda/core/device_code.h"

#include <algorithm>
#include <sstream>

#include "check.h"

namespace tilemoe::cuda {

bool has_code(std::string_view archs, const DeviceInfo& device) {
  const auto runs = [&](std::string_view arch) {
    if (arch == "80") return device.major >= 8;  // with PTX, for what has no code of its own
    if (arch == "90" || arch == "90a") return device.major == 9 && device.minor == 0;
    if (arch == "100" || arch == "100f") return device.major == 10;
    return arch == "120" && device.major == 12;
  };
  for (size_t end = 0; !archs.empty(); archs.remove_prefix(std::min(end + 1, archs.size()))) {
    end = std::min(archs.find(','), archs.size());
    if (runs(archs.substr(0, end))) return true;
  }
  return false;
}

void require_code(std::string_view archs, const DeviceInfo& device) {
  TILEMOE_CHECK_SUPPORTED(has_code(archs, device),
                          device.name
                              << " has compute capability " << device.capability()
                              << ", this build has code for " << archs
                              << ": build with another TILEMOE_CUDA_ARCHS, or use the CPU backend");
}

std::string why_no_device(cudaError_t found, int driver) {
  constexpr int kMajor =
      CUDART_VERSION / 1000;  // a driver of a major version runs all of its minors
  constexpr int kNeededDriver = kMajor == 13 ? 580 : kMajor == 12 ? 525 : 0;
  std::ostringstream text;
  if (found == cudaErrorInsufficientDriver && driver == 0) {
    text << "no CUDA device here, since no NVIDIA driver is installed: install one, or use the CPU "
            "backend";
  } else if (found == cudaErrorInsufficientDriver) {
    text << "the NVIDIA driver here supports CUDA " << driver / 1000 << "." << driver % 1000 / 10
         << ", and this build needs CUDA " << kMajor;
    if (kNeededDriver > 0) text << " (driver " << kNeededDriver << " or newer)";
    text << ": update the driver, or use the CPU backend";
  } else if (found == cudaErrorNoDevice || found == cudaSuccess) {
    text << "no CUDA device here: no NVIDIA GPU is to be seen; use the CPU backend";
  } else {
    text << "no CUDA device here (" << describe_error(found) << "): use the CPU backend";
  }
  return text.str();
}

}  // namespace tilemoe::cuda
