// The options that say where a subcommand runs: --device and --threads.
#pragma once

#include <CLI/CLI.hpp>
#include <string>

#include "tilemoe/layer.h"

namespace tilemoe::app {

struct DeviceOptions {
  std::string device = "auto";
  int threads = 0;  // 0: one a core

  void add_to(CLI::App& command);
  // The device asked for, with the number of threads set. Throws std::runtime_error with the reason
  // where this build or machine does not have it, or no layer runs on it.
  Device select() const;
};

// "cpu", "cuda"
const char* name_of(Device device);

// What a user wants of an error of the library's, "function: reason [file:line: expression]": the
// reason.
std::string in_words(std::string reason);

// Why the library cannot use `device`; empty where it can.
std::string why_unavailable(Device device);
// Why it cannot run a layer there: a GPU may do for routing alone.
std::string why_no_layer(Device device);

}  // namespace tilemoe::app
