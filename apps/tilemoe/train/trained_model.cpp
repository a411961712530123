#include "train/trained_model.h"

#include <stdexcept>
#include <string>

#include "exit_status.h"
#include "train/checkpoint.h"
#include "train/memory_need.h"
#include "train/options.h"

namespace tilemoe::train {
namespace {

TrainerConfig config_of(const std::filesystem::path& path, const CheckpointSummary& summary) {
  CLI::App command;
  OptionTable table(command);
  ModelOptions options;
  options.add_to(table);
  try {
    table.take_missing(summary.state.value("config", nlohmann::json::object()));
    return options.checked();
  } catch (const app::WrongUsage& error) {  // not the user's
    throw std::runtime_error(path.string() + ": its configuration is wrong: " + error.what());
  }
}

}  // namespace

std::unique_ptr<Model> load_model(const std::filesystem::path& path, Device device,
                                  std::optional<int64_t> length) {
  const Checkpoint checkpoint(path);
  TrainerConfig config = config_of(path, checkpoint.summary());
  config.model.device = device;
  config.model.max_parameters = checkpoint.summary().weights;
  config.model.trained = false;
  const Sequences capacity{1, length.value_or(config.batch.length)};
  require_memory(config.model, capacity);
  auto model = std::make_unique<Model>(config.model, capacity, config.seed);
  ArraysOnHost weights(model->weights(), device == Device::kCpu);
  checkpoint.load(weights.tensors(), kOptimizerPrefix);
  weights.write_back();
  return model;
}

}  // namespace tilemoe::train
