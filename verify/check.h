// A case run and judged: what `tilemoe check` prints and the tests assert.
#pragma once

#include <string>
#include <vector>

#include "compare.h"
#include "memory.h"
#include "problem.h"
#include "reference.h"

namespace tilemoe::verify {

struct TensorReport {
  Output output;
  Figures figures;
  Limit limit;
  bool passed;
  int spoilings_tried;
  // Spoilings of this tensor that the same limit let pass: a defect of the comparison.
  std::vector<std::string> missed_spoilings;
};

struct Report {
  std::vector<TensorReport> tensors;
  std::vector<std::string> damage;  // inputs changed, bytes written outside outputs
  bool passed() const;
};

// Integer cases must be equal to the evaluation that rounds, the others within limit_for.
// Judges what the passes write.
Report check_case(const Case& test_case, uint64_t seed, Memory& memory = host_memory(),
                  Passes passes = Passes::kAll);

}  // namespace tilemoe::verify
