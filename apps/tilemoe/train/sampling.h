// Text from a model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "train/model.h"

namespace tilemoe::train {

struct SamplingConfig {
  int64_t bytes = 0;
  std::string prompt;      // the text to continue; begins after a line end
  double temperature = 1;  // 0 takes the likeliest byte
  uint64_t seed = 0;
};

// Gives `take` the bytes after the prompt, each as soon as it is known; ends early if it returns
// false. They depend on the weights and the configuration alone. A text that is longer than the
// model's longest sequence is seen from its end.
void sample(Model& model, const SamplingConfig& config, const std::function<bool(char)>& take);
// All of them.
std::string sample(Model& model, const SamplingConfig& config);

}  // namespace tilemoe::train
