// Hashes of what a GPU computed, with which a simulated GPU is compared: tests/data/digests.jsonl,
// one case per line, {device, values: {arch, case, seed, inputs, then each tensor's hash}, ...};
// lines without a case are outcomes of `scripts/gpu/run.py digests`, which writes such a file.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include "verify/digest.h"

namespace tilemoe::simulator {

// Whether the bits of an output follow from what is known of the hardware. If the activation has
// approximate instructions, whose last bits are not documented, only those of H do.
bool has_known_bits(const verify::Case& test_case, verify::Output output);

class ExpectedDigests {
 public:
  // Reads the digests of one arch, "sm80" or "sm90". Throws std::runtime_error, with the reason, if
  // the file cannot be read, is not a file of digests, or contains none of the arch.
  ExpectedDigests(const std::string& file, const std::string& arch);

  bool has(const std::string& case_name) const { return cases_.contains(case_name); }
  // The GPU: "NVIDIA H100 80GB HBM3".
  const std::string& device() const { return device_; }

  struct Comparison {
    int equal = 0;                         // tensors
    std::vector<std::string> differences;  // a line each
  };
  // Compares a case that the file has, run with `seed`: the outputs whose bits are known. An output
  // that the file lacks is a difference.
  Comparison compare(const verify::Case& test_case, uint64_t seed,
                     const verify::CaseDigests& computed) const;

 private:
  struct Expected {
    uint64_t seed;
    std::string inputs;
    std::map<std::string, std::string> tensors;
  };
  std::map<std::string, Expected> cases_;
  std::string device_;
};

}  // namespace tilemoe::simulator
