#include "cuda/device_verdict.h"

#include <fstream>
#include <sstream>

#include "cuda/sm100/pairs.h"
#include "generated/sources_id.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cuda {
namespace {

// The module's release, where the system tells it, and what the driver beside the program supports.
std::string driver_of_this_machine() {
  std::ostringstream said;
  said << std::ifstream("/proc/driver/nvidia/version").rdbuf();
  std::string text = driver_release(said.str());
  int version = 0;
  cudaDriverGetVersion(&version);  // 0 without a driver
  text.append(text.empty() ? "" : ", ").append("CUDA ");
  return text + std::to_string(version / 1000) + "." + std::to_string(version % 1000 / 10);
}

}  // namespace

VerdictKey verdict_key(const DeviceInfo& device, const std::string& kit) {
  return {.library = std::string(tilemoe_version()) + ", " TILEMOE_SOURCES_ID,
          .driver = driver_of_this_machine(),
          .gpu = device.name + ", compute capability " + device.capability() + ", " +
                 std::to_string(device.multiprocessors) + " multiprocessors",
          .kit = kit + (kit == "sm100" && sm100::pairs_asked_for() ? "-pairs" : "")};
}

const FoundVerdict& verdict_of(const DeviceInfo& device) {
  static OncePerDevice<FoundVerdict> found;
  return found.get(device.index,
                   [&] { return find_verdict(state_folder(), verdict_key(device, "sm100")); });
}

}  // namespace tilemoe::cuda
