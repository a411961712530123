// A training run as the user sees it: folder, checkpoints, log, progress, a calm end on Ctrl-C.
#pragma once

#include <nlohmann/json.hpp>
#include <vector>

#include "train/log.h"
#include "train/options.h"
#include "train/progress.h"
#include "train/run_folder.h"
#include "train/stop.h"

namespace tilemoe::train {

// The options of a run as they are written down.
struct RunRecord {
  nlohmann::json options;             // in the log and the checkpoints
  nlohmann::json kept;                // in the folder
  std::vector<OptionChange> changed;  // when the run was resumed
};

class TrainingRun {
 public:
  // Opens the run's folder, and loads the checkpoint if `options` name one. All arguments but
  // `record` must outlive the run. Throws std::exception with one clear sentence, as train() does.
  TrainingRun(const TrainerConfig& config, const RunOptions& options, const Corpus& corpus,
              RunRecord record);

  // Trains to the last step, or until the user stops it; evaluates, saves, prints a sample. Returns
  // the number of the signal that stopped it, 0 if none did.
  int train();

 private:
  void require_free_folder() const;
  JsonLog open_log();
  JsonLog begin_log(const std::filesystem::path& path);
  JsonLog resume_log(const std::filesystem::path& path);
  Course course() const;
  void step(Progress& progress);
  void evaluate(Progress& progress);
  void save(Progress& progress);
  void print_sample();

  const TrainerConfig& config_;
  const RunOptions& options_;
  const RunRecord record_;
  const StopSignal stop_;
  Trainer trainer_;
  RunFolder folder_;
  JsonLog log_;
  bool saved_ = false;      // the last step
  bool evaluated_ = false;  // the last step
};

}  // namespace tilemoe::train
