// Runs and checks a case: `tilemoe check` prints the report, and the tests assert it.
#pragma once

#include <functional>
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
  uint64_t bits = 0;  // a hash of the output (digest.h); 0 if it was not read whole
  int spoilings_tried;
  // Spoilings that would change nothing: the truth has nothing to drop, zero or swap.
  std::vector<std::string> impossible_spoilings;
  // Spoilings of this tensor that pass the same limit, or that could not be made although the truth
  // can be spoiled: a defect of the comparison.
  std::vector<std::string> missed_spoilings;
};

struct Report {
  std::vector<TensorReport> tensors;
  std::vector<std::string> damage;  // inputs changed, bytes written outside outputs
  bool passed() const;
};

// Compares the outputs of the passes with the truth. Integer cases must be equal to the evaluation
// that rounds, the others within limit_for.
Report judge(const Inputs& inputs, const std::vector<Pair>& pairs, const Computed& computed,
             Passes passes);

// Runs the case and compares its outputs.
Report check_case(const Case& test_case, uint64_t seed, Memory& memory = host_memory(),
                  Passes passes = Passes::kAll);

// Runs the case `repeats` times while the device does other work as well. Returns the number of the
// first run, counted from 0, whose outputs have other bits than run 0's, or -1.
int64_t find_other_bits(const Case& test_case, uint64_t seed, int64_t repeats, Memory& memory,
                        Passes passes);

// Runs the case before and after `change`, which makes the library compute it in another way.
// Returns the names of the outputs whose bits changed.
std::vector<std::string> outputs_changed_by(const std::function<void()>& change,
                                            const Case& test_case, uint64_t seed, Memory& memory,
                                            Passes passes);

}  // namespace tilemoe::verify
