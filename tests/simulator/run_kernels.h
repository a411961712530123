// Runs a kernel with a seed and reads the findings.
#pragma once

#include <cuda_runtime_api.h>
#include <gtest/gtest.h>

#include <fstream>
#include <string>
#include <vector>

#include "simulator/machine/machine.h"

namespace tilemoe::simulator_test {

using simulator::Finding;
using simulator::FindingKind;
using simulator::Machine;
using simulator::Schedule;

constexpr int kSeeds = 20;

// "kernels.cu:31": the line of that file whose comment is that word.
inline std::string line_of(const std::string& word, const std::string& name = "kernels.cu") {
  std::ifstream file(TILEMOE_KERNELS_FOLDER + ("/" + name));
  std::string line;
  for (int number = 1; std::getline(file, line); ++number)
    if (line.size() >= word.size() + 3 &&
        line.compare(line.size() - word.size() - 3, std::string::npos, "// " + word) == 0)
      return name + ":" + std::to_string(number);
  ADD_FAILURE() << "no line is marked " << word;
  return "";
}

template <class T>
class Array {
 public:
  explicit Array(size_t count, bool written = true) : count_(count) {
    cudaMalloc(reinterpret_cast<void**>(&data_), count * sizeof(T));
    if (written) cudaMemset(data_, 0, count * sizeof(T));
  }
  explicit Array(const std::vector<T>& values) : Array(values.size()) {
    cudaMemcpy(data_, values.data(), count_ * sizeof(T), cudaMemcpyHostToDevice);
  }
  ~Array() { cudaFree(data_); }
  Array(const Array&) = delete;
  Array& operator=(const Array&) = delete;
  T* data() const { return data_; }
  std::vector<T> read() const {
    std::vector<T> values(count_);
    cudaMemcpy(values.data(), data_, count_ * sizeof(T), cudaMemcpyDeviceToHost);
    return values;
  }

 private:
  size_t count_;
  T* data_ = nullptr;
};

// The findings of a run; `error` is what the host received.
struct Outcome {
  std::vector<Finding> findings;
  cudaError_t error;
};
template <class Run>
Outcome run_with(uint64_t seed, const Run& run) {
  Machine& machine = Machine::instance();
  machine.take_findings();
  machine.set_seed(seed);
  run();
  const cudaError_t error = cudaDeviceSynchronize();
  return {machine.take_findings(), error};
}

// Over all seeds with one schedule: the number of runs with right output and the number of runs
// with findings. run(seed, right) returns the outcome.
struct Tally {
  int right = 0, found = 0;
};
template <class Run>
Tally tally(Schedule schedule, const Run& run) {
  Tally tally;
  Machine::instance().set_schedule(schedule);
  for (uint64_t seed = 0; seed < kSeeds; ++seed) {
    bool right = false;
    const Outcome outcome = run(seed, right);
    if (right) ++tally.right;
    if (!outcome.findings.empty()) ++tally.found;
  }
  Machine::instance().set_schedule(Schedule::kAny);
  return tally;
}

inline std::string all(const std::vector<Finding>& findings) {
  std::string text;
  for (const Finding& finding : findings) text += describe(finding) + "\n";
  return text;
}
inline const Finding* find(const Outcome& outcome, FindingKind kind) {
  for (const Finding& finding : outcome.findings)
    if (finding.kind == kind) return &finding;
  return nullptr;
}
inline bool begins(const std::string& text, const std::string& with) {
  return text.compare(0, with.size(), with) == 0;
}
inline bool names(const std::string& text, const std::string& line) {
  return (text + " ").find(line + " ") != std::string::npos;
}

}  // namespace tilemoe::simulator_test
