// The cases of the registry that a command runs, from its options.
#pragma once

#include <string>
#include <vector>

#include "case.h"

namespace tilemoe::verify {

struct Selection {
  std::vector<std::string> patterns = {};  // of names (patterns.h); without one, every case
  std::string dtype = "all";               // or "float32", "bfloat16", "float16"
  bool reduced = false;                    // the quick cases alone

  // In the registry's order. Huge cases are selected by their full name only. A GPU does not
  // compute in float32, so its cases leave that out unless `dtype` names it, and those of a recipe
  // that its arch lacks.
  std::vector<Case> choose(Device device) const;
  // The reason if a pattern matches none of `chosen`: a sentence that names `list`, the command
  // that lists all cases; empty if every pattern matches.
  std::string complaint(const std::vector<Case>& chosen, const std::string& list) const;

 private:
  bool match(const Case& test_case) const;
};

// [{"case": "swiglu/float32", "rows": 203, "d": 136, "n": 72, "E": 7, "K": 3}]
std::string to_json(const std::vector<Case>& cases);

}  // namespace tilemoe::verify
