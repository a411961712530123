// The names of the steps that a call runs.
#pragma once

#include <algorithm>
#include <string>
#include <vector>

#include "core/backend.h"

namespace tilemoe::test {

class StepNames final : public StepObserver {
 public:
  void begin(const char* step) override { names.emplace_back(step); }
  void end(const char* /*step*/) override {}
  bool have(const char* name) const { return std::ranges::find(names, name) != names.end(); }
  std::vector<std::string> names;
};

}  // namespace tilemoe::test
