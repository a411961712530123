// What `tilemoe doctor --blackwell` found out about a kit on a GPU, and the file that keeps it: the
// command writes one, the library reads it. No CUDA here.
//
// A file is about one key, has one value a line, and ends with a checksum of the lines above it:
//
//   tilemoe verdict 1
//   library 0.2.0, sources 0123456789abcdef, nvcc 13.0.88
//   driver 580.95.05, CUDA 13.0
//   gpu NVIDIA B200, compute capability 10.0, 148 multiprocessors
//   kit sm100
//   outcome agreed
//   date 2026-11-23
//   what agreed with sm80 in 40 cases, 312 tensors, each 1000 times
//   check fedcba9876543210
#pragma once

#include <optional>
#include <string>

namespace tilemoe::cuda {

// Where one of these is another, a verdict says nothing.
struct VerdictKey {
  std::string library;  // the version, the sources and the compiler of the kernels
  std::string driver;
  std::string gpu;  // its kind, not the one device: wrong code is wrong on all of them
  std::string kit;  // "sm100", "sm100-pairs"
  bool operator==(const VerdictKey&) const = default;
};

enum class Outcome { kAgreed, kDisagreed, kHung, kCrashed, kError };

struct Verdict {
  VerdictKey key;
  Outcome outcome = Outcome::kError;
  std::string date;  // "2026-11-23"; told, never judged: a clock may be wrong
  std::string what;  // "hung after 600 s in swiglu/bfloat16 by sm100"
  bool operator==(const Verdict&) const = default;
};

const char* name_of(Outcome outcome);  // "agreed"

// A verdict, or why there is none.
struct FoundVerdict {
  std::optional<Verdict> verdict = {};
  std::string why_none = "`tilemoe doctor --blackwell` has not run";

  bool agreed() const { return verdict && verdict->outcome == Outcome::kAgreed; }
  // What follows "sm80, since ": "sm100 hung after 600 s in swiglu/bfloat16 by sm100, on 2026-11-23
  // with driver 580.95.05, CUDA 13.0".
  std::string words() const;
};

// "agreed with sm80 in 40 cases, 312 tensors, each 1000 times, on 2026-11-23 with driver 580.95.05"
std::string in_words(const Verdict& verdict);

std::string text_of(const Verdict& verdict);
// What is none of this version's whole, unchanged texts gives no verdict.
FoundVerdict parse_verdict(const std::string& text);

// $TILEMOE_STATE_DIR, else $XDG_STATE_HOME/tilemoe, else ~/.local/state/tilemoe; empty where the
// environment names none of them.
std::string state_folder();
// "/home/me/.local/state/tilemoe/sm100-0123456789abcdef.verdict": each key has its own file.
std::string verdict_file(const std::string& folder, const VerdictKey& key);
// Reads the key's file. Never throws, and never waits for what is no plain file.
FoundVerdict find_verdict(const std::string& folder, const VerdictKey& key) noexcept;

// "580.95.05" of what /proc/driver/nvidia/version says; empty where it is not there.
std::string driver_release(const std::string& said);

}  // namespace tilemoe::cuda
