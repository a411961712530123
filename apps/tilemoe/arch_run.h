// Verification cases by one arch, in a child process: a kernel that traps or hangs is a failure of
// the run. Two runs on one GPU, or one simulated GPU, must have the same bits.
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "verify/case.h"
#include "verify/memory.h"
#include "verify/problem.h"

namespace tilemoe::app {

struct ArchTask {
  std::string arch;  // "sm90"
  std::vector<verify::Case> cases;
  uint64_t seed = 1;
  int64_t repeats = 0;  // of each case
  verify::Passes passes = verify::Passes::kAll;
  std::chrono::milliseconds max_silence = std::chrono::seconds(600);  // per case
  // Called in the child: selects the arch. Returns why it cannot be used; empty if it can.
  std::function<std::string(const std::string& arch)> select;
  std::function<verify::Memory&()> memory;  // called in the child, after `select`
  // Called before each case, by its index.
  std::function<void(size_t)> on_case = [](size_t) {};
};

struct ArchRun {
  struct Tensor {
    std::string of_case, name, bits;  // a hash
    bool operator==(const Tensor&) const = default;
  };

  std::string arch = {};
  std::string skipped = {};  // why it was not run; then nothing follows
  std::string device = {};
  size_t cases = 0;  // that were run to their end
  int tensors = 0;   // that were compared with float64
  std::vector<Tensor> bits = {};
  std::vector<std::string> failures = {};

  // "sm90: 40 cases, 312 tensors, 0 failures", and the first failures, a line each
  std::string text() const;
  nlohmann::json json() const;
};

ArchRun run_arch(const ArchTask& task);

// A line for each case that both ran and whose bits differ:
// "swiglu/bfloat16: dX, dW1 by sm90 have other bits than by sm80".
std::vector<std::string> differences(const ArchRun& one, const ArchRun& other);
// The comparison of the cases that both ran.
size_t tensors_compared(const ArchRun& one, const ArchRun& other);

}  // namespace tilemoe::app
