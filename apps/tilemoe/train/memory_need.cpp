#include "train/memory_need.h"

#include <algorithm>
#include <cstdio>
#include <optional>
#include <stdexcept>
#include <string>

#include "train/model.h"

namespace tilemoe::train {
namespace {

MemoryNeed count(ModelConfig config, Sequences capacity, int64_t layers) {
  CountingMemory memory;
  config.layers = layers;
  config.memory = &memory;
  Model model(config, capacity, 0);
  const double parameters =
      static_cast<double>(model.parameters().count()) * static_cast<double>(sizeof(float));
  const double gradients = config.trained ? parameters : 0;
  return {.parameters = parameters,
          .gradients = gradients,
          .optimizer = 2 * gradients,  // AdamW's two means
          .activations = memory.bytes() - parameters - gradients};
}

std::string gigabytes(double bytes) {
  char text[32];
  std::snprintf(text, sizeof text, "%.*f GB", bytes < 1e10 ? 2 : 0, bytes / 1e9);
  return text;
}

}  // namespace

// Layers are alike, and what they share is the most that one of them needs: two suffice.
MemoryNeed memory_need(const ModelConfig& config, Sequences capacity) {
  const MemoryNeed one = count(config, capacity, 1);
  if (config.layers == 1) return one;
  const MemoryNeed two = count(config, capacity, 2);
  const auto with_all = [&](double MemoryNeed::*part) {
    return one.*part + static_cast<double>(config.layers - 1) * (two.*part - one.*part);
  };
  return {.parameters = with_all(&MemoryNeed::parameters),
          .gradients = with_all(&MemoryNeed::gradients),
          .optimizer = with_all(&MemoryNeed::optimizer),
          .activations = with_all(&MemoryNeed::activations)};
}

void require_memory(const ModelConfig& config, Sequences capacity) {
  const std::optional<double> available = make_operators(config.device)->memory().available();
  const MemoryNeed need = memory_need(config, capacity);
  if (!available || need.total() <= *available) return;
  std::string parts = "parameters " + gigabytes(need.parameters);
  if (config.trained)
    parts +=
        ", gradients " + gigabytes(need.gradients) + ", optimizer " + gigabytes(need.optimizer);
  throw std::runtime_error("the model requires " + gigabytes(need.total()) + " of memory (" +
                           parts + ", activations " + gigabytes(need.activations) + "), but " +
                           gigabytes(*available) + " are free; " +
                           (config.trained ? "reduce the model or --batch"
                                           : "close other programs or use a smaller model"));
}

}  // namespace tilemoe::train
