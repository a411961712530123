// The options of `tilemoe train`.
#pragma once

#include <filesystem>
#include <string>
#include <vector>

#include "train/option_table.h"
#include "train/text.h"
#include "train/trainer.h"

namespace tilemoe::train {

// Options that decide every bit of the result: kept in the checkpoint, and the same when a run is
// resumed, but for those of may_change().
struct ModelOptions {
  std::vector<std::string> text;
  int64_t validation_bytes = kDefaultValidationBytes;

  int64_t layers = 2, width = 192, embedded_bytes = 4;
  int64_t heads = 4, head_width = 16, taps = 4;
  int64_t experts = 32, top_k = 2, expert_width = 128;
  std::string activation = "swiglu";
  bool dense = false, experts_off = false;

  std::string routing = "top-k", scoring = "softmax-chosen";
  int64_t m = 128;
  double bias_rate = 1e-3, balance_loss = 0.02, z_loss = 1e-4;

  int64_t steps = 1000, batch = 8, length = 512, warm_up = 60;
  double learning_rate = 4.5e-3, head_learning_rate = 1e-2, final_rate = 0.05;
  double beta1 = 0.9, beta2 = 0.95, weight_decay = 0.2, clip = 0.5;
  int64_t seed = 0;

  void add_to(OptionTable& table);
  // The values of a new run that `table` does not have: warm-up is at most a tenth of its steps.
  void settle(const OptionTable& table);
  // Throws app::WrongUsage with one sentence that names the option.
  TrainerConfig checked() const;
};

// Whether a run may continue with another value of that option: it decides neither the data nor the
// model.
bool may_change(const std::string& option);

// Options that may differ when a run is resumed. Those in `kept` have the values of the
// interrupted run, unless they are given.
struct RunOptions {
  std::filesystem::path out, resume;
  std::string log;
  int64_t save_every = 200;
  int64_t keep = 2;
  int64_t evaluate_every = 0;

  void add_to(CLI::App& command, OptionTable& kept);
  // Throws app::WrongUsage with one sentence that names the option.
  void check() const;
};

}  // namespace tilemoe::train
