// Wrong results on purpose: a comparison that lets one of them pass is worth nothing.
#pragma once

#include <optional>
#include <vector>

#include "inputs.h"
#include "problem.h"
#include "reference.h"

namespace tilemoe::verify {

enum class Spoiling {
  kZeroed,
  kTwoRowsSwapped,
  kExpertDropped,
  kAdaptersSwapped,  // of two experts
  kScaleTwice,       // of adapters
  kRankSwapped,      // two columns of B of every adapter
};
constexpr Spoiling kSpoilings[] = {Spoiling::kZeroed,        Spoiling::kTwoRowsSwapped,
                                   Spoiling::kExpertDropped, Spoiling::kAdaptersSwapped,
                                   Spoiling::kScaleTwice,    Spoiling::kRankSwapped};
const char* spoiling_name(Spoiling spoiling);

// Spoils the results of one case.
class Spoiler {
 public:
  Spoiler(const Inputs& inputs, const std::vector<Pair>& pairs, const Results& truth);

  // Whether the spoiling is one of the tensor's: those of adapters, if it depends on them.
  bool concerns(Spoiling spoiling, Output output) const;

  // Whether the truth can be spoiled: not if the tensor is zero, for a swap not if all rows are
  // equal, for a dropped expert not without pairs.
  bool applies(Spoiling spoiling, Output output) const;

  // The spoiled copy of `values`, or none. If the spoiling applies, none is a defect: all values
  // are zero, all rows are equal or small, or no expert matters.
  std::optional<std::vector<float>> spoil(Spoiling spoiling, Output output,
                                          const std::vector<float>& values) const;

 private:
  std::optional<std::vector<float>> swap_rows(Output output, std::vector<float> values) const;
  std::optional<std::vector<float>> drop_expert(Output output, std::vector<float> values) const;

  // The results with wrong adapters less the truth.
  std::optional<Results> difference(const Inputs& wrong, const std::vector<Pair>& pairs) const;
  const std::optional<Results>& difference_of(Spoiling spoiling) const;

  // The size of a row; in ds a row is one pair.
  std::ptrdiff_t row_size(Output output) const;

  Case case_;
  bool has_pairs_;
  const Results& truth_;

  // The contribution of one expert to each output: the expert with the fewest rows among those that
  // matter to some token.
  std::optional<Results> contribution_;
  std::optional<Results> swapped_, scaled_twice_, rank_swapped_;  // empty without adapters
};

}  // namespace tilemoe::verify
