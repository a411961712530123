// What `tilemoe doctor` found on a GPU, and how it is told: a text to paste into an issue, and JSON.
#pragma once

#include <cstdint>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

namespace tilemoe::app {

struct DoctorGpu {
  std::string name = {};        // "NVIDIA GeForce RTX 4090"
  std::string capability = {};  // "8.9"
  int multiprocessors = 0;
  size_t shared_bytes = 0;  // that a block may have
  size_t total_bytes = 0, free_bytes = 0;
  std::string driver = {};       // "580.95.05"; empty where the system does not tell
  std::string driver_cuda = {};  // "13.0", the newest that it supports
  std::string runtime = {};      // "13.0", of the library
};

// Forward and backward of one layer, in ms; or why there are none.
struct DoctorTimes {
  std::string layer = {};  // "wide"
  int64_t T = 0, d = 0, n = 0, E = 0, K = 0;
  bool fewer_tokens = false;  // than the layer has elsewhere, for want of memory
  double forward = 0, backward = 0;
  double dense = 0;  // the six products of a layer's two passes, dense, by the vendor's library
  std::string skipped = {};  // not measured; nothing is wrong
  std::string failed = {};
};

struct DoctorKit {
  std::string kit = {};      // "sm80"
  std::string skipped = {};  // why it does not run here; then nothing follows
  int cases = 0, tensors = 0;
  double seconds = 0;
  std::vector<std::string> failures = {};
  std::vector<DoctorTimes> times = {};
};

struct DoctorReport {
  std::string version, commit, build;
  DoctorGpu gpu;
  std::string kit;  // the one that runs by itself, and why
  std::vector<DoctorKit> kits;

  // Something ran, and nothing failed.
  bool passed() const;
  std::string verdict() const;
  std::string text() const;
  nlohmann::json json() const;
};

}  // namespace tilemoe::app
