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
  Spoiler(const Inputs& inputs, const std::vector<Pair>& pairs, const Results& truth);

  // Whether the truth leaves anything to spoil: a tensor of zeros does not, nor does a swap in one
  // of equal rows, nor a lost expert where there is no pair.
  bool applies(Spoiling spoiling, Output output) const;

  // The spoiled copy of `values`. None where it does not apply; where it does, a defect: values
  // that are all zero, rows that are all equal or small, or no expert that has a say.
  std::optional<std::vector<float>> spoil(Spoiling spoiling, Output output,
                                          const std::vector<float>& values) const;

 private:
  std::optional<std::vector<float>> swap_rows(Output output, std::vector<float> values) const;
  std::optional<std::vector<float>> drop_expert(Output output, std::vector<float> values) const;

  // Of ds, single pairs.
  std::ptrdiff_t row_size(Output output) const;

  Case case_;
  bool has_pairs_;
  const Results& truth_;

  // What one expert adds to each output: the one with the fewest rows of those that matter to some
  // token.
  std::optional<Results> share_;
};

}  // namespace tilemoe::verify
