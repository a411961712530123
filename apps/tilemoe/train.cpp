#include <cstdio>
#include <memory>

#include "commands.h"
#include "device.h"
#include "train/run.h"

namespace tilemoe::app {
namespace {

struct TrainOptions {
  explicit TrainOptions(CLI::App& command) : table(command) {
    model.add_to(table);
    run.add_to(command);
    device.add_to(command);
  }

  train::ModelOptions model;
  train::RunOptions run;
  DeviceOptions device;
  train::OptionTable table;
};

// A resumed run is the one that was interrupted: what the command line leaves out is as it was
// then, and what it gives must be the same.
void take_saved_options(TrainOptions& options) {
  const auto checkpoint = train::find_checkpoint(options.run.resume);
  const nlohmann::json saved = train::Trainer::saved_options(checkpoint);
  options.table.take_missing(saved);
  train::require_same_options(saved, options.table.to_json(), checkpoint);
}

void announce_device() {
  std::printf("on %s; the experts compute in bfloat16, all else in float32\n",
              tilemoe_device_description(TILEMOE_CUDA));
}

int train_model(TrainOptions& options) {
  const Device device = options.device.select();
  if (!options.run.resume.empty()) take_saved_options(options);
  train::TrainerConfig config = options.model.checked();
  config.model.device = device;
  if (device == Device::kCuda) announce_device();
  const train::Corpus corpus = train::load_corpus(
      {options.model.text.begin(), options.model.text.end()}, options.model.held_bytes);
  train::TrainingRun(config, options.run, corpus, options.table.to_json()).train();
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
