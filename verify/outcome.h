// Runs a case in both of its forms, for the reports of `check` and `doctor` on the command line and
// in the PyTorch package.
#pragma once

#include <string>
#include <vector>

#include "check.h"

namespace tilemoe::verify {

struct Outcome {
  struct Row {
    std::string name;  // "swiglu/float32 (integers)"
    TensorReport tensor;
    bool good() const { return tensor.passed && tensor.missed_spoilings.empty(); }
  };

  std::vector<Row> rows;
  std::vector<std::string> failures;    // a sentence each, with the case's name
  std::vector<std::string> impossible;  // spoilings that would change nothing
  int spoilings = 0;
  int refused = 0;  // forms of the case that the backend does not support
};

// Runs the case on unit-scale data against float64, and on small whole numbers bit for bit. With
// `repeats` also runs it `repeats` times on a busy device; all results must have the same bits. A
// case that the backend does not support is a failure; any other error of the library is thrown.
Outcome run_case(const Case& test_case, uint64_t seed, int64_t repeats, Memory& memory,
                 Passes passes);

// {"rows": [{"case", "tensor", "frobenius", "frobenius_limit", "worst_row", "worst_row_limit",
// "passed", "bits"}], "failures": [], "impossible": [], "spoilings": 0, "refused": 0}; null for
// NaN, infinity and bits that were not read.
std::string to_json(const Outcome& outcome);

}  // namespace tilemoe::verify
