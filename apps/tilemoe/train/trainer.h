// The training itself, without a word to the user: steps, evaluation, and all that a checkpoint
// holds.
#pragma once

#include <filesystem>
#include <nlohmann/json.hpp>
#include <vector>

#include "train/adamw.h"
#include "train/batches.h"
#include "train/checkpoint.h"
#include "train/evaluation.h"
#include "train/model.h"
#include "train/schedule.h"
#include "train/text.h"

namespace tilemoe::train {

struct TrainerConfig {
  ModelConfig model;
  AdamWConfig optimizer;
  Schedule schedule;
  Sequences batch{8, 512};
  uint64_t seed = 0;
  int64_t evaluation_context = 256;
};

struct StepResult {
  int64_t step = 0;  // steps done, this one included
  double loss = 0;   // mean over the batch, nats a byte
  double learning_rate = 0;
  double gradient_norm = 0;           // before clipping
  bool taken = false;                 // else loss or gradient is not finite, and nothing changed
  std::vector<RouterReport> routers;  // a layer each
};

class Trainer {
 public:
  // `corpus` must outlive the trainer. Throws std::runtime_error if its text is too short.
  Trainer(const TrainerConfig& config, const Corpus& corpus);

  int64_t steps_done() const { return steps_done_; }
  bool done() const { return steps_done_ >= config_.schedule.steps; }
  // Leaves all as it was if the loss or the gradient's norm is not a finite number.
  StepResult step();
  // The loss of the validation text.
  Evaluation evaluate(const std::function<bool(double)>& go_on = {});

  // The weights, then everything else that the next step depends on. On a GPU they are copies,
  // valid until the next call.
  std::vector<TensorRef> tensors();
  // The same as numbers; `options` are those of the command line.
  nlohmann::json state(const nlohmann::json& options) const;
  // Takes both from a checkpoint. Throws std::runtime_error if the file is bad, of another
  // shape, or was trained on another text.
  void load(const std::filesystem::path& checkpoint);

  Model& model() { return model_; }
  const Corpus& corpus() const { return corpus_; }

 private:
  std::vector<NamedArray> arrays();

  const TrainerConfig config_;
  const Corpus& corpus_;
  Model model_;
  AdamW optimizer_;
  Batches batches_;
  std::vector<uint8_t> inputs_;   // (sequences, past + length)
  std::vector<uint8_t> targets_;  // (T)
  ArraysOnHost on_host_;
  int64_t steps_done_ = 0;
  int64_t sequences_done_ = 0;
};

}  // namespace tilemoe::train
