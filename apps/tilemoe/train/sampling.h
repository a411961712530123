// Text from a model.
#pragma once

#include <cstdint>
#include <functional>
#include <string>

#include "train/model.h"

namespace tilemoe::train {

struct SamplingConfig {
  int64_t bytes = 0;
  std::string prompt;      // what the text goes on from; begins after a line end
  double temperature = 1;  // 0 takes the likeliest byte
  uint64_t seed = 0;
};

// The bytes after the prompt. They depend on the weights and the configuration alone. `stopped`,
// asked before each byte, ends the text early.
std::string sample(Model& model, const SamplingConfig& config,
                   const std::function<bool()>& stopped = {});

}  // namespace tilemoe::train
