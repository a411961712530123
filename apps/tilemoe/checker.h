// Cases run one after the other: what `tilemoe check` and `tilemoe doctor` print.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "verify/outcome.h"

namespace tilemoe::app {

class Checker {
 public:
  Checker(uint64_t seed, int64_t repeats, verify::Memory& memory, verify::Passes passes);

  // verify::run_case
  void run(const verify::Case& test_case);

  void print(std::ostream& out) const;
  // The counts of all cases so far.
  const verify::Outcome& outcome() const { return all_; }
  int tensors() const { return static_cast<int>(all_.rows.size()); }
  const std::vector<std::string>& failures() const { return all_.failures; }

 private:
  uint64_t seed_;
  int64_t repeats_;
  verify::Memory& memory_;
  verify::Passes passes_;
  verify::Outcome all_;
};

}  // namespace tilemoe::app
