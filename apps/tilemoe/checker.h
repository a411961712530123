// Cases run and judged one after the other: what `tilemoe check` and `tilemoe doctor` print.
#pragma once

#include <iosfwd>
#include <string>
#include <vector>

#include "table.h"
#include "verify/check.h"

namespace tilemoe::app {

class Checker {
 public:
  Checker(uint64_t seed, int64_t repeats, verify::Memory& memory, verify::Passes passes);

  // The case on unit-scale data against float64, and on small whole numbers bit for bit. An error
  // of the library that is no refusal is thrown.
  void run(const verify::Case& test_case);

  void print(std::ostream& out) const { table_.print(out); }
  int tensors() const { return tensors_; }
  int refused() const { return refused_; }
  int spoilings() const { return spoilings_; }
  const std::vector<std::string>& impossible() const { return impossible_; }
  const std::vector<std::string>& failures() const { return failures_; }

 private:
  bool judge(const verify::Case& test_case);
  void repeat(const verify::Case& test_case);
  void add(const std::string& name, const verify::TensorReport& tensor);

  uint64_t seed_;
  int64_t repeats_;
  verify::Memory& memory_;
  verify::Passes passes_;
  Table table_{{{"case", Table::Align::kLeft},
                {"tensor", Table::Align::kLeft},
                {"Frobenius"},
                {"limit"},
                {"worst row"},
                {"limit"},
                {"", Table::Align::kLeft}}};
  std::vector<std::string> failures_;
  std::vector<std::string> impossible_;
  int tensors_ = 0;
  int refused_ = 0;
  int spoilings_ = 0;
};

}  // namespace tilemoe::app
