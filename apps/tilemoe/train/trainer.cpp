#include "train/trainer.h"

#include <cmath>
#include <stdexcept>
#include <string>

namespace tilemoe::train {
namespace {

// What decides the training text and the validation text. `validation_bytes` was `held_bytes` in
// older checkpoints.
nlohmann::json identity_of(const Corpus& corpus) {
  return {{"sha256", corpus.sha256},
          {"split_sha256", corpus.split_sha256},
          {"train_bytes", corpus.train.size()},
          {"validation_bytes", corpus.validation.size()}};
}

void require_same_text(const std::filesystem::path& checkpoint, const nlohmann::json& state,
                       const Corpus& corpus) {
  const nlohmann::json saved = state.value("text", nlohmann::json());
  const nlohmann::json now = identity_of(corpus);
  const auto refuse = [&](const std::string& why) {
    throw std::runtime_error("cannot resume from " + checkpoint.string() + ": " + why);
  };
  if (!saved.is_object()) refuse("its state has no text");
  const auto of = [](const nlohmann::json& text, const char* key) {
    return text.value(key, nlohmann::json()).dump();
  };
  if (of(saved, "sha256") != of(now, "sha256"))
    refuse("expected a text with SHA-256 " + of(saved, "sha256") + ", got " + of(now, "sha256"));
  for (const auto& [key, value] : now.items()) {
    const bool is_older = key == "validation_bytes" && !saved.contains(key);
    if (of(saved, is_older ? "held_bytes" : key.c_str()) != value.dump())
      refuse("the text is the same, but it is split differently into training and validation");
  }
}

int64_t sequences_in(const std::filesystem::path& checkpoint, const nlohmann::json& state) {
  const auto data = state.find("data");
  const nlohmann::json sequences = data != state.end() && data->is_object()
                                       ? data->value("sequences", nlohmann::json())
                                       : nlohmann::json();
  if (!sequences.is_number_unsigned() || sequences.get<uint64_t>() > uint64_t{INT64_MAX} / 2)
    throw std::runtime_error(checkpoint.string() + ": its state has no number of sequences");
  return sequences.get<int64_t>();
}

}  // namespace

Trainer::Trainer(const TrainerConfig& config, const Corpus& corpus)
    : config_(config),
      corpus_(corpus),
      model_(config.model, config.batch, config.seed),
      optimizer_(config.optimizer, model_.parameters()),
      batches_(corpus.train, config.batch, model_.past(), config.seed),
      inputs_(static_cast<size_t>(config.batch.count * (model_.past() + config.batch.length))),
      targets_(static_cast<size_t>(config.batch.tokens())) {}

StepResult Trainer::step() {
  const int64_t step = steps_done_ + 1;
  const double factor = config_.schedule.factor(step);
  StepResult result;
  result.step = step;
  result.learning_rate = factor * config_.optimizer.learning_rate;
  batches_.fill(sequences_done_, inputs_, targets_);
  result.loss = model_.loss_and_gradient(config_.batch, step, inputs_, targets_);
  result.gradient_norm = std::isfinite(result.loss) ? optimizer_.update(step, factor) : result.loss;
  result.taken = std::isfinite(result.gradient_norm);
  for (MoeLayer* layer : model_.moe_layers()) {
    result.routers.push_back(layer->report());
    if (result.taken) layer->balance_selection();
  }
  if (result.taken) {
    steps_done_ = step;
    sequences_done_ += config_.batch.count;
  }
  return result;
}

Evaluation Trainer::evaluate(const std::function<bool(double)>& go_on) {
  return train::evaluate(model_, corpus_.validation, config_.evaluation_context, go_on);
}

std::vector<NamedArray> Trainer::arrays() {
  std::vector<NamedArray> arrays = model_.weights();
  for (AdamW::Moments& moments : optimizer_.moments()) {
    const Parameter& parameter = *moments.parameter;
    arrays.push_back({"optimizer.mean." + parameter.name, parameter.shape, &moments.mean});
    arrays.push_back({"optimizer.square." + parameter.name, parameter.shape, &moments.square});
  }
  return arrays;
}

std::vector<TensorRef> Trainer::tensors() {
  on_host_ = ArraysOnHost(arrays(), model_.operators().device() == Device::kCpu);
  return on_host_.tensors();
}

// The random numbers of a step follow from the seed and the step; its batch's places in the text
// from the seed and the sequences before it, which a run that changed --batch did not have alike.
nlohmann::json Trainer::state(const nlohmann::json& options) const {
  nlohmann::json text = identity_of(corpus_);
  text["files"] = corpus_.names;
  return {{"step", steps_done_},
          {"random", {{"seed", config_.seed}, {"step", steps_done_}}},
          {"data", {{"sequences", sequences_done_}}},
          {"text", text},
          {"config", options}};
}

void Trainer::load(const std::filesystem::path& checkpoint) {
  const CheckpointSummary saved =
      load_checkpoint(checkpoint, tensors(), "", [&](const CheckpointSummary& found) {
        require_same_text(checkpoint, found.state, corpus_);
        sequences_in(checkpoint, found.state);
      });
  on_host_.write_back();
  on_host_ = {};
  steps_done_ = saved.step;
  sequences_done_ = sequences_in(checkpoint, saved.state);
}

}  // namespace tilemoe::train
