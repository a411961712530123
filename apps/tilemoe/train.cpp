#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>

#include "commands.h"
#include "device.h"
#include "train/run.h"

namespace tilemoe::app {
namespace {

struct TrainOptions {
  explicit TrainOptions(CLI::App& command) : table(command), kept(command) {
    model.add_to(table);
    run.add_to(command, kept);
    device.add_to(command);
  }

  train::ModelOptions model;
  train::RunOptions run;
  DeviceOptions device;
  train::OptionTable table;  // of `model`
  train::OptionTable kept;   // of `run`
};

// A resumed run is the one that was interrupted: what the command line leaves out is as it was
// then, and what it gives must be the same. The text is known by its contents, wherever it lies now
// (Trainer::load). Returns how many numbers the checkpoint has for the model's parameters.
int64_t take_saved_options(TrainOptions& options) {
  const auto checkpoint = train::find_checkpoint(options.run.resume);
  const train::CheckpointSummary found = train::read_checkpoint(checkpoint);
  nlohmann::json saved = found.state.value("config", nlohmann::json());
  if (!saved.is_object())
    throw std::runtime_error(checkpoint.string() + ": its state has no \"config\"");
  options.table.take_missing(saved);
  nlohmann::json now = options.table.to_json();
  saved.erase("text"), now.erase("text");
  train::require_same_options(saved, now, checkpoint);
  options.kept.take_missing(train::RunFolder::options_of(checkpoint.parent_path()));
  return found.weights;
}

void announce_device() {
  std::printf("on %s; the experts compute in bfloat16, all else in float32\n",
              tilemoe_device_description(TILEMOE_CUDA));
}

int train_model(TrainOptions& options) {
  const Device device = options.device.select();
  const bool resumed = !options.run.resume.empty();
  const int64_t weights = resumed ? take_saved_options(options) : INT64_MAX;
  options.run.check();
  // Found again from another folder.
  if (!options.run.log.empty())
    options.run.log = std::filesystem::absolute(options.run.log).string();
  train::TrainerConfig config = options.model.checked();
  config.model.device = device;
  config.model.most_parameters = weights;
  if (device == Device::kCuda) announce_device();
  const train::Corpus corpus = train::load_corpus(
      {options.model.text.begin(), options.model.text.end()}, options.model.held_bytes);
  train::TrainingRun(config, options.run, corpus, options.table.to_json(), options.kept.to_json())
      .train();
  return 0;
}

}  // namespace

void add_train(CLI::App& app, Run& run) {
  CLI::App* const command = app.add_subcommand(
      "train", "Train a byte-level language model whose feed-forwards are Mixtures of Experts");
  const auto options = std::make_shared<TrainOptions>(*command);
  command->callback([options, &run] { run = [options] { return train_model(*options); }; });
}

}  // namespace tilemoe::app
