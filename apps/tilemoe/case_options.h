// The options that say which cases of the registry a subcommand runs, and how.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/problem.h"

namespace tilemoe::app {

struct CaseOptions {
  std::vector<std::string> patterns;
  std::string dtype = "all";
  std::string pass = "all";
  uint64_t seed = 1;
  bool reduced = false;

  void add_to(CLI::App& command);
  // In the registry's order; throws WrongUsage where a pattern matches none. float32 is for the CPU
  // alone, so a GPU is asked for it by --dtype only.
  std::vector<verify::Case> choose(Device device) const;
  verify::Passes passes() const;

 private:
  bool match(const verify::Case& test_case) const;
};

}  // namespace tilemoe::app
