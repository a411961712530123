// A case of the registry in the simulator, with several seeds of the schedule.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "simulator/expected_digests.h"
#include "simulator/machine/finding.h"
#include "simulator/setting.h"
#include "verify/case.h"

namespace tilemoe::simulator {

struct Job {
  const Setting* setting;
  verify::Case test_case;
  uint64_t data_seed, first_seed;
  int64_t seeds;
  Schedule schedule = Schedule::kAny;
  const ExpectedDigests* expected = nullptr;  // of a GPU; compared if it has the case
};

struct SeedOutcome {
  uint64_t seed;
  std::string wrong;  // what is wrong, one line each; empty: the output is right
  std::vector<Finding> findings;
  uint64_t trace;    // a digest of all that happened, in order
  uint64_t bits;     // of all outputs
  int equal_to_gpu;  // tensors that have the bits of Job::expected
  double seconds;    // of the processor
  bool good() const { return wrong.empty() && findings.empty(); }
};

// Calls each(outcome) after every seed. The first output is compared with float64 and with a GPU's
// bits, the outputs of further seeds with the first one's bits.
template <class Each>
void run_case(const Job& job, const Each& each);

// ---- implementation

// A job under way.
class CaseRun {
 public:
  explicit CaseRun(const Job& job);
  ~CaseRun();
  CaseRun(const CaseRun&) = delete;
  CaseRun& operator=(const CaseRun&) = delete;
  SeedOutcome run(uint64_t seed);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

template <class Each>
void run_case(const Job& job, const Each& each) {
  CaseRun run(job);
  for (int64_t i = 0; i < job.seeds; ++i) each(run.run(job.first_seed + static_cast<uint64_t>(i)));
}

}  // namespace tilemoe::simulator
