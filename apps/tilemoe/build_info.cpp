#include "build_info.h"

#include <dnnl.h>

#include <fstream>

#include "commit.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::app {
namespace {

std::string onednn_version() {
  const dnnl_version_t* version = dnnl_version();
  return std::to_string(version->major) + "." + std::to_string(version->minor) + "." +
         std::to_string(version->patch);
}

}  // namespace

BuildInfo build_info() {
  return {.version = tilemoe_version(),
          .commit = TILEMOE_COMMIT,
          .build_type = TILEMOE_BUILD_TYPE,
          .compiler = TILEMOE_COMPILER,
          .onednn = onednn_version()};
}

nlohmann::json versions() {
  const BuildInfo build = build_info();
  return {{"tilemoe", build.version},
          {"onednn", build.onednn},
          {"compiler", build.compiler},
          {"build_type", build.build_type}};
}

std::string cpu_model() {
  std::ifstream file("/proc/cpuinfo");
  for (std::string line; std::getline(file, line);) {
    if (!line.starts_with("model name")) continue;
    if (const size_t colon = line.find(": "); colon != std::string::npos)
      return line.substr(colon + 2);
  }
  return "unknown";
}

}  // namespace tilemoe::app
