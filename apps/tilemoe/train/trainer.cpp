#include "train/trainer.h"

#include <stdexcept>

namespace tilemoe::train {
namespace {

nlohmann::json field(const std::filesystem::path& checkpoint, const nlohmann::json& state,
                     const char* name) {
  if (!state.contains(name))
    throw std::runtime_error(checkpoint.string() + ": its state has no \"" + name +
                             "\": it was not written by `tilemoe train`");
  return state.at(name);
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
  batches_.fill(step, inputs_, targets_);
  result.loss = model_.loss_and_gradient(config_.batch, step, inputs_, targets_);
  result.gradient_norm = optimizer_.update(step, factor);
  for (MoeLayer* layer : model_.moe_layers()) {
    result.routers.push_back(layer->report());
    layer->balance_selection();
  }
  steps_done_ = step;
  return result;
}

Evaluation Trainer::evaluate(const std::function<bool()>& stopped) {
  return train::evaluate(model_, corpus_.held, config_.evaluation_context, stopped);
}

std::vector<Trainer::Held> Trainer::held_tensors() {
  std::vector<Held> held;
  for (Parameter& parameter : model_.parameters().all())
    held.push_back({parameter.name, parameter.shape, &parameter.value});
  int64_t layer_index = 0;
  for (MoeLayer* layer : model_.moe_layers()) {
    FloatArray& bias = layer->selection_bias();
    if (bias.size() > 0)
      held.push_back({"blocks." + std::to_string(layer_index) + ".moe.router.selection_bias",
                      {bias.size()},
                      &bias});
    ++layer_index;
  }
  for (AdamW::Moments& moments : optimizer_.moments()) {
    const Parameter& parameter = *moments.parameter;
    held.push_back({"optimizer.mean." + parameter.name, parameter.shape, &moments.mean});
    held.push_back({"optimizer.square." + parameter.name, parameter.shape, &moments.square});
  }
  return held;
}

std::vector<TensorRef> Trainer::tensors() {
  const bool in_place = model_.operators().device() == Device::kCpu;
  copies_.clear();
  std::vector<TensorRef> tensors;
  for (Held& held : held_tensors()) {
    if (!in_place) copies_.push_back(held.array->read());
    tensors.push_back({std::move(held.name), std::move(held.shape),
                       in_place ? held.array->data() : copies_.back().data()});
  }
  return tensors;
}

// The random numbers of a step follow from the seed and the step, and so do its batch's places in
// the text: the state of both is written down for whoever reads the file.
nlohmann::json Trainer::state(const nlohmann::json& options) const {
  return {{"step", steps_done_},
          {"random", {{"seed", config_.seed}, {"step", steps_done_}}},
          {"data", {{"sequences", steps_done_ * config_.batch.count}}},
          {"text",
           {{"sha256", corpus_.sha256},
            {"files", corpus_.names},
            {"train_bytes", corpus_.train.size()},
            {"held_bytes", corpus_.held.size()}}},
          {"config", options}};
}

void Trainer::load(const std::filesystem::path& checkpoint) {
  const nlohmann::json saved = read_checkpoint_state(checkpoint);
  const auto text = field(checkpoint, saved, "text");
  const auto sha256 = field(checkpoint, text, "sha256").get<std::string>();
  if (sha256 != corpus_.sha256)
    throw std::runtime_error("cannot resume from " + checkpoint.string() +
                             ": it was trained on a text with SHA-256 " + sha256 +
                             ", but this text has " + corpus_.sha256);
  const auto steps = field(checkpoint, saved, "step").get<int64_t>();
  load_checkpoint(checkpoint, tensors());
  const std::vector<Held> held = held_tensors();
  for (size_t i = 0; i < copies_.size(); ++i) held[i].array->write(copies_[i]);
  copies_.clear();
  steps_done_ = steps;
}

nlohmann::json Trainer::saved_options(const std::filesystem::path& checkpoint) {
  return field(checkpoint, read_checkpoint_state(checkpoint), "config");
}

}  // namespace tilemoe::train
