// The options that select where a subcommand runs: --device, --threads and --arch.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "tilemoe/layer.h"

namespace tilemoe::app {

struct DeviceOptions {
  std::string device = "auto";
  int threads = 0;  // 0: one a core

  void add_to(CLI::App& command);
  // Returns the device that is selected, and sets the number of threads. Throws
  // std::runtime_error with the reason if this build or machine does not have the device, or no
  // layer runs on it.
  Device select() const;
};

inline const std::vector<std::string> kArchs = {"sm80", "sm90", "sm100"};

// --arch, and --kit, its older name.
class ArchOption {
 public:
  void add_to(CLI::App& command, const std::string& help);
  // Empty without one of the options. Warns of the older name; throws WrongUsage if the two differ.
  std::string name() const;

 private:
  std::string arch_, older_;
};

// --limit, in seconds, after which a silent child process counts as hung.
void add_limit(CLI::App& command, int& seconds);

// Selects the arch for the whole process, as TILEMOE_ARCH does. Before the first use of a GPU.
void select_arch(const std::string& arch);
// Selects it, and returns why no layer runs with it; empty if one does.
std::string why_no_arch(const std::string& arch);

// "cpu", "cuda"
const char* name_of(Device device);

// The reason in an error of the library, "function: reason [file:line: expression]".
std::string in_words(std::string reason);

// Why the library cannot use `device`; empty if it can.
std::string why_unavailable(Device device);
// Why it cannot run a layer there: a GPU may do for routing alone.
std::string why_no_layer(Device device);

}  // namespace tilemoe::app
