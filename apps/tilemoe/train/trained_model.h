// A model out of a checkpoint, to be used and not to be trained.
#pragma once

#include <filesystem>
#include <memory>
#include <optional>

#include "train/model.h"

namespace tilemoe::train {

// Takes the weights alone: neither the text nor the optimizer's state, of which there is nothing in
// memory. The whole file is checked first. `length`: the longest sequence that the model will see,
// that of the training without one. Throws std::runtime_error if the file is bad (Checkpoint) or
// memory is short.
std::unique_ptr<Model> load_model(const std::filesystem::path& checkpoint, Device device,
                                  std::optional<int64_t> length = std::nullopt);

}  // namespace tilemoe::train
