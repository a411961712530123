// `tilemoe doctor --blackwell`: whether a kit that its authors never ran is right on this GPU. A
// child compares it with another kit (compare_kits.h); this process opens no GPU, waits, and writes
// the verdict that the library reads (cuda/verdict.h).
#pragma once

#include <chrono>
#include <functional>
#include <nlohmann/json.hpp>
#include <string>
#include <vector>

#include "cuda/verdict.h"

namespace tilemoe::app {

struct Trial {
  cuda::VerdictKey key;
  std::string folder;                // of the verdicts
  std::vector<std::string> command;  // the child's program and its arguments
  std::chrono::milliseconds most_silent = std::chrono::seconds(600);
  // Told of each step that the child begins, and of the part of the work before it.
  std::function<void(const std::string& step, double done)> on_step = [](const auto&, double) {};
};

struct TrialReport {
  cuda::Verdict verdict;
  std::string file;  // that keeps it
  std::vector<std::string> disagreements;

  bool agreed() const { return verdict.outcome == cuda::Outcome::kAgreed; }
  std::string text() const;
  nlohmann::json json() const;
};

// Throws std::runtime_error, and leaves no verdict on the key, where there is none to be had: another
// trial of the same key is going on, the folder cannot be written, the child refuses, or somebody
// ends it. An earlier verdict on the key goes when the child starts.
TrialReport try_kit(const Trial& trial);

}  // namespace tilemoe::app
