// The memory that a model takes of its device, known before any of it is taken.
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

// The need of a model built for batches of `capacity`, with an optimizer if config.trained. The
// model is built for it, in memory that only counts: exact but for memory that the libraries keep.
MemoryNeed memory_need(const ModelConfig& config, Sequences capacity);

// Throws std::runtime_error, with both numbers, if less is free on the device than the model
// needs. If the free memory is unknown, nothing is refused.
void require_memory(const ModelConfig& config, Sequences capacity);

}  // namespace tilemoe::train
