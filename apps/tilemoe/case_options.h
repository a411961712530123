// The options that say which cases of the registry a subcommand runs, and how.
#pragma once

#include <CLI/CLI.hpp>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/problem.h"
#include "verify/selection.h"

namespace tilemoe::app {

struct CaseOptions {
  verify::Selection selection;
  std::string pass = "all";
  uint64_t seed = 1;

  void add_to(CLI::App& command);
  // Throws WrongUsage if a pattern matches no case.
  std::vector<verify::Case> choose(Device device) const;
  verify::Passes passes() const;
};

}  // namespace tilemoe::app
