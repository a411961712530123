#include "device.h"

#include <cstdlib>
#include <stdexcept>

namespace tilemoe::app {

const char* name_of(Device device) {
  return device == Device::kCuda ? "cuda" : "cpu";
}

std::string in_words(std::string reason) {
  if (const size_t function = reason.find(": "); function != std::string::npos)
    reason.erase(0, function + 2);
  if (const size_t place = reason.rfind(" ["); place != std::string::npos) reason.erase(place);
  return reason;
}

std::string why_unavailable(Device device) {
  if (tilemoe_device_available(to_c(device))) return "";
  return in_words(tilemoe_last_error());
}

std::string why_no_layer(Device device) {
  if (std::string reason = why_unavailable(device); !reason.empty()) return reason;
  constexpr int64_t T = 16, d = 16, n = 8, E = 4, K = 2;
  const Experts experts{.device = device, .dtype = DType::kBFloat16, .d = d, .n = n, .E = E};
  try {
    static_cast<void>(
        experts.workspace_bytes(RoutingSpec::top_k(device, T, E, K), BackwardMode::kWhole));
    return "";
  } catch (const Error& error) {
    return in_words(error.what());
  }
}

void DeviceOptions::add_to(CLI::App& command) {
  command.add_option("--device", device, "Where to run: cpu, cuda, or auto for the best there is")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--threads", threads, "Threads of the CPU backend; 0 for one a core")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

Device DeviceOptions::select() const {
  check(tilemoe_set_num_threads(threads));
  if (device == "cpu") return Device::kCpu;
  const std::string reason = why_no_layer(Device::kCuda);
  if (device == "cuda" && !reason.empty()) throw std::runtime_error("--device cuda: " + reason);
  // Where a kit was asked for and the GPU cannot have it, the CPU does not take its place.
  const char* const kit = std::getenv("TILEMOE_KIT");
  if (kit && *kit && !reason.empty() && why_unavailable(Device::kCuda).empty())
    throw std::runtime_error(reason);
  return reason.empty() ? Device::kCuda : Device::kCpu;
}

}  // namespace tilemoe::app
