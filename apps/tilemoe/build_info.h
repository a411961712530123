// The sources, options and tools of this executable.
#pragma once

#include <nlohmann/json.hpp>
#include <string>

namespace tilemoe::app {

struct BuildInfo {
  std::string version;
  std::string commit;      // "unknown" outside a git checkout; "-dirty" if the sources differ
  std::string build_type;  // "Release"
  std::string compiler;    // "GNU 12.2.0"
  std::string onednn;      // of the library loaded at run time: "2.6.3"
};

BuildInfo build_info();

// The libraries a measured number depends on: {"tilemoe", "onednn", "compiler", ...}.
nlohmann::json versions();

// The processor's name as the operating system gives it; "unknown" if it does not.
std::string cpu_model();

}  // namespace tilemoe::app
