// Wrong results on purpose: a comparison that lets one of them pass is worth nothing.
#pragma once

#include <optional>
#include <vector>

#include "inputs.h"
#include "problem.h"
#include "reference.h"

namespace tilemoe::verify {

enum class Spoiling { kZeroed, kTwoRowsSwapped, kExpertDropped };
constexpr Spoiling kSpoilings[] = {Spoiling::kZeroed, Spoiling::kTwoRowsSwapped,
                                   Spoiling::kExpertDropped};
const char* spoiling_name(Spoiling spoiling);

// Spoils the results of one case.
class Spoiler {
 public:
  Spoiler(const Inputs& inputs, const std::vector<Pair>& pairs);

  // The spoiled copy of `values`, or none where the spoiling would change nothing that matters: a
  // tensor of zeros, of one row or of equal rows, or no expert that has a say.
  std::optional<std::vector<float>> spoil(Spoiling spoiling, Output output,
                                          const std::vector<float>& values) const;

 private:
  std::optional<std::vector<float>> swap_rows(Output output, std::vector<float> values) const;
  std::optional<std::vector<float>> drop_expert(Output output, std::vector<float> values) const;

  Case case_;
  // What one expert adds to each output: the one with the fewest rows of those that matter to some
  // token.
  std::optional<Results> share_;
};

}  // namespace tilemoe::verify
