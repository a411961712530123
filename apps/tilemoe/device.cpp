#include "device.h"

#include <cstdlib>
#include <iostream>
#include <stdexcept>

#include "exit_status.h"

namespace tilemoe::app {

void ArchOption::add_to(CLI::App& command, const std::string& help) {
  command.add_option("--arch", arch_, help)->check(CLI::IsMember(kArchs));
  command.add_option("--kit", older_, "Older name of --arch")
      ->check(CLI::IsMember(kArchs))
      ->group("");  // not listed
}

std::string ArchOption::name() const {
  if (older_.empty()) return arch_;
  if (!arch_.empty() && arch_ != older_)
    throw WrongUsage("--arch " + arch_ + " and --kit " + older_ + ", its older name, differ");
  std::cerr << "tilemoe: warning: --kit is the older name of --arch\n";
  return older_;
}

void add_limit(CLI::App& command, int& seconds) {
  command
      .add_option("--limit", seconds,
                  "Time limit per case in seconds; a case that exceeds it has failed")
      ->check(CLI::Range(1, 86400))
      ->capture_default_str();
}

void select_arch(const std::string& arch) {
  setenv("TILEMOE_ARCH", arch.c_str(), 1);
  unsetenv("TILEMOE_KIT");
}

std::string why_no_arch(const std::string& arch) {
  select_arch(arch);
  return why_no_layer(Device::kCuda);
}

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
  command.add_option("--device", device, "Device: cpu, cuda, or auto (the GPU if it can be used)")
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}))
      ->capture_default_str();
  command.add_option("--threads", threads, "Threads of the CPU backend (0 = one per core)")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
}

Device DeviceOptions::select() const {
  check(tilemoe_set_num_threads(threads));
  if (device == "cpu") return Device::kCpu;
  const std::string reason = why_no_layer(Device::kCuda);
  if (device == "cuda" && !reason.empty()) throw std::runtime_error("--device cuda: " + reason);
  // If an arch was selected and the GPU cannot run it, the CPU does not replace it.
  for (const char* name : {"TILEMOE_ARCH", "TILEMOE_KIT"}) {
    const char* const arch = std::getenv(name);
    if (arch && *arch && !reason.empty() && why_unavailable(Device::kCuda).empty())
      throw std::runtime_error(reason);
  }
  return reason.empty() ? Device::kCuda : Device::kCpu;
}

}  // namespace tilemoe::app
