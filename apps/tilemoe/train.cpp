#include <cstdint>
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "commands.h"
#include "device.h"
#include "exit_status.h"
#include "train/memory_need.h"
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

// Facts of a checkpoint that are read before the model is built.
struct SavedRun {
  int64_t weights = INT64_MAX;  // numbers that it has for the model's parameters
  std::vector<train::OptionChange> changed;
};

// A resumed run is the one that was interrupted: what the command line leaves out is as it was
// then, and what it gives must be the same, but for may_change(). The text is known by its contents,
// wherever it lies now (Trainer::load).
SavedRun take_saved_options(TrainOptions& options) {
  const auto checkpoint = train::find_checkpoint(options.run.resume);
  const train::CheckpointSummary found = train::read_checkpoint(checkpoint);
  nlohmann::json saved = found.state.value("config", nlohmann::json());
  if (!saved.is_object())
    throw std::runtime_error(checkpoint.string() + ": its state has no \"config\"");
  saved = options.table.with_present_names(std::move(saved));
  options.table.take_missing(saved);
  if (options.model.steps < found.step)
    throw WrongUsage("--steps must be >= " + std::to_string(found.step) + ", the step of " +
                     checkpoint.string() + ", got " + std::to_string(options.model.steps));
  nlohmann::json now = options.table.to_json();
  saved.erase("text"), now.erase("text");
  SavedRun run{found.weights, train::changed_options(saved, now)};
  for (const train::OptionChange& change : run.changed)
    if (train::may_change(change.name)) saved.erase(change.name), now.erase(change.name);
  train::require_same_options(saved, now, checkpoint);
  nlohmann::json kept = train::RunFolder::options_of(checkpoint.parent_path());
  if (!options.run.out.empty()) kept.erase("log");  // it stays the other run's
  options.kept.take_missing(kept);
  return run;
}

void announce_device() {
  std::printf("device: %s; experts in bfloat16, everything else in float32\n",
              tilemoe_device_description(TILEMOE_CUDA));
}

int train_model(TrainOptions& options) {
  const Device device = options.device.select();
  const bool resumed = !options.run.resume.empty();
  SavedRun saved;
  if (resumed)
    saved = take_saved_options(options);
  else
    options.model.settle(options.table);
  options.run.check();
  // Found again from another folder.
  if (!options.run.log.empty())
    options.run.log = std::filesystem::absolute(options.run.log).string();
  train::TrainerConfig config = options.model.checked();
  config.model.device = device;
  config.model.max_parameters = saved.weights;
  train::require_memory(config.model, config.batch);
  if (device == Device::kCuda) announce_device();
  const train::Corpus corpus = train::load_corpus(
      {options.model.text.begin(), options.model.text.end()}, options.model.validation_bytes);
  const int signal = train::TrainingRun(config, options.run, corpus,
                                        {.options = options.table.to_json(),
                                         .kept = options.kept.to_json(),
                                         .changed = std::move(saved.changed)})
                         .train();
  return signal == 0 ? kDone : kEndedBySignal + signal;
}

}  // namespace

void add_train(CLI::App& app, Run& run) {
  CLI::App* const command =
      app.add_subcommand("train", "Train a small byte-level Mixture-of-Experts language model");
  const auto options = std::make_shared<TrainOptions>(*command);
  command->callback([options, &run] { run = [options] { return train_model(*options); }; });
}

}  // namespace tilemoe::app
