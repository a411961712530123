// What a model takes of its device's memory, known before any of it is taken.
#pragma once

#include "train/model_config.h"
#include "train/ops/shapes.h"

namespace tilemoe::train {

// Bytes.
struct MemoryNeed {
  double parameters = 0;
  double gradients = 0;
  double optimizer = 0;
  double activations = 0;  // what else a step has, the layers' workspace included

  double total() const { return parameters + gradients + optimizer + activations; }
};

// Of a model built for batches of `capacity`, with an optimizer where config.trained. The model is
// built for it, in memory that only counts: exact but for what the libraries keep for themselves.
MemoryNeed memory_need(const ModelConfig& config, Sequences capacity);

// Throws std::runtime_error, with both numbers, where less is free on the device than the model
// needs. What is free is not known everywhere; then nothing is refused.
void require_memory(const ModelConfig& config, Sequences capacity);

}  // namespace tilemoe::train
