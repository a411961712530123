// A training run as the user sees it: folder, checkpoints, log, progress, a calm end on Ctrl-C.
#pragma once

#include <nlohmann/json.hpp>

#include "train/log.h"
#include "train/options.h"
#include "train/progress.h"
#include "train/run_folder.h"
#include "train/stop.h"

namespace tilemoe::train {

class TrainingRun {
 public:
  // Opens the run's folder, and takes the checkpoint where `options` name one. `saved_options` are
  // what log and checkpoints keep, `kept_options` what the folder does; all else must outlive the
  // run. Throws std::exception with one clear sentence, as train() does.
  TrainingRun(const TrainerConfig& config, const RunOptions& options, const Corpus& corpus,
              const nlohmann::json& saved_options, const nlohmann::json& kept_options);

  // Trains to the last step, or until the user stops it; evaluates, saves, prints a sample.
  void train();

 private:
  void require_free_folder() const;
  JsonLog open_log(const nlohmann::json& kept_options);
  void step(Progress& progress);
  void evaluate(Progress& progress);
  void save(Progress& progress);
  void print_sample();

  const TrainerConfig& config_;
  const RunOptions& options_;
  const nlohmann::json saved_options_;
  const StopSignal stop_;
  Trainer trainer_;
  RunFolder folder_;
  JsonLog log_;
  double smooth_loss_ = 0;  // for the eye
  bool saved_ = false;      // the last step
  bool evaluated_ = false;  // the last step
};

}  // namespace tilemoe::train
