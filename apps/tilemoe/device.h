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
  // where this build or machine does not have it.
  Device select() const;
};

// "cpu", "cuda"
const char* name_of(Device device);

// A reason of the library's for a user: CUDA's names of errors become sentences.
std::string in_words(const std::string& reason);

// Why the library cannot use `device`; empty where it can.
std::string why_unavailable(Device device);

}  // namespace tilemoe::app
