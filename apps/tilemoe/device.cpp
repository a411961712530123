#include "device.h"

#include <stdexcept>

namespace tilemoe::app {

const char* name_of(Device device) {
  return device == Device::kCuda ? "cuda" : "cpu";
}

std::string why_unavailable(Device device) {
  if (tilemoe_device_available(to_c(device))) return "";
  // The library's text is "function: reason [file:line: expression]"; a user wants the reason.
  std::string reason = tilemoe_last_error();
  if (const size_t function = reason.find(": "); function != std::string::npos)
    reason.erase(0, function + 2);
  if (const size_t place = reason.rfind(" ["); place != std::string::npos) reason.erase(place);
  return reason;
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
  const std::string reason = why_unavailable(Device::kCuda);
  if (device == "cuda" && !reason.empty()) throw std::runtime_error("--device cuda: " + reason);
  return reason.empty() ? Device::kCuda : Device::kCpu;
}

}  // namespace tilemoe::app
