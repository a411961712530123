#include "train/model.h"

#include <cmath>
#include <numeric>

namespace tilemoe::train {
namespace {

// Bytes further back count for less at first.
void scale_past_tables(Parameter& embedding, int64_t tables) {
  const int64_t table = embedding.size() / tables;
  std::vector<float> values = embedding.value.read();
  for (int64_t j = 1; j < tables; ++j) {
    const float scale = 0.5f / std::sqrt(static_cast<float>(j));
    for (int64_t i = j * table; i < (j + 1) * table; ++i) values[static_cast<size_t>(i)] *= scale;
  }
  embedding.value.write(values);
}

}  // namespace

Model::Model(const ModelConfig& config, Sequences capacity, uint64_t seed)
    : config_(config),
      capacity_(capacity),
      operators_(make_operators(config.device)),
      parameters_(seed, *operators_,
                  {.max_numbers = config.max_parameters,
                   .trained = config.trained,
                   .memory = config.memory}),
      workspace_(*operators_, config.memory),
      embedding_(parameters_.add_normal("embedding.weight",
                                        {config.embedded_bytes, kByteValues, config.width},
                                        ParameterGroup::kOther, 0.05)),
      head_norm_("head_norm.", config.width, capacity.tokens(), parameters_, workspace_),
      head_(parameters_.add_constant("head.weight", {kByteValues, config.width},
                                     ParameterGroup::kHead, 0.f)),
      head_bias_(parameters_.add_constant("head.bias", {kByteValues}, ParameterGroup::kHead, 0.f)) {
  const int64_t T = capacity.tokens(), d = config.width;
  if (parameters_.initialized()) scale_past_tables(embedding_, config.embedded_bytes);
  for (int64_t layer = 0; layer < config.layers; ++layer)
    blocks_.emplace_back(config_, "blocks." + std::to_string(layer) + ".", capacity, seed,
                         parameters_, workspace_);
  inputs_ = workspace_.array<uint8_t>(capacity.count * (past() + capacity.length));
  targets_ = workspace_.array<uint8_t>(T);
  embedded_ = workspace_.floats(T * d);
  logits_ = workspace_.floats(T * kByteValues);
  losses_ = workspace_.floats(T);
  dx_ = workspace_.floats(T * d);
  du_ = workspace_.floats(T * d);
  workspace_.need_scratch(linear_backward_weight_scratch({T, d, kByteValues}));
  workspace_.need_scratch(bias_gradient_scratch(T, kByteValues));
  workspace_.allocate();
}

Floats Model::forward(Phase phase, int64_t step, Sequences sequences, ConstBytes inputs) {
  const int64_t T = sequences.tokens(), d = config_.width;
  const Floats embedded = embedded_.first(T * d), logits = logits_.first(T * kByteValues);
  inputs_.write(inputs);
  operators_->embed(sequences, inputs_.first(std::ssize(inputs)), embedding_.value.span(),
                    embedded);
  last_ = embedded;
  for (Block& block : blocks_) last_ = block.forward(phase, step, sequences, last_);
  operators_->linear({T, d, kByteValues}, head_norm_.forward(last_), head_.value.span(), logits);
  operators_->add_bias(head_bias_.value.span(), logits);
  return logits;
}

ConstBytes Model::put_targets(ConstBytes targets) {
  targets_.write(targets);
  return targets_.first(std::ssize(targets));
}

ConstFloats Model::on_host(const FloatArray& array, int64_t count) {
  if (operators_->device() == Device::kCpu) return array.first(count);
  host_ = array.read_first(count);
  return host_;
}

ConstFloats Model::logits(Sequences sequences, ConstBytes inputs) {
  forward(Phase::kEvaluate, 0, sequences, inputs);
  return on_host(logits_, sequences.tokens() * kByteValues);
}

ConstFloats Model::losses(Sequences sequences, ConstBytes inputs, ConstBytes targets) {
  const int64_t T = sequences.tokens();
  const ConstFloats logits = forward(Phase::kEvaluate, 0, sequences, inputs);
  operators_->cross_entropy(logits, put_targets(targets), losses_.first(T));
  return on_host(losses_, T);
}

double Model::loss_and_gradient(Sequences sequences, int64_t step, ConstBytes inputs,
                                ConstBytes targets) {
  const int64_t T = sequences.tokens(), d = config_.width;
  const Floats dx = dx_.first(T * d), du = du_.first(T * d);
  const Floats scratch = workspace_.scratch();
  const Floats dlogits = forward(Phase::kTrain, step, sequences, inputs);
  operators_->cross_entropy_with_gradient(dlogits, put_targets(targets),
                                          1.f / static_cast<float>(T), losses_.first(T));

  operators_->bias_gradient(dlogits, head_bias_.gradient.span(), scratch);
  operators_->linear_backward_weight({T, d, kByteValues}, dlogits, head_norm_.output(last_),
                                     head_.gradient.span(), scratch);
  operators_->linear_backward_input({T, d, kByteValues}, dlogits, head_.value.span(), du);
  operators_->clear(dx);
  head_norm_.backward(last_, du, dx);
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block)
    block->backward(sequences, dx, du);
  operators_->embed_backward(sequences, inputs_.first(std::ssize(inputs)), dx,
                             embedding_.gradient.span());
  const ConstFloats losses = on_host(losses_, T);
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(T);
}

std::vector<NamedArray> Model::weights() {
  std::vector<NamedArray> weights;
  for (Parameter& parameter : parameters_.all())
    weights.push_back({parameter.name, parameter.shape, &parameter.value});
  int64_t layer_index = 0;
  for (MoeLayer* layer : moe_layers()) {
    FloatArray& bias = layer->selection_bias();
    if (bias.size() > 0)
      weights.push_back({"blocks." + std::to_string(layer_index) + ".moe.router.selection_bias",
                         {bias.size()},
                         &bias});
    ++layer_index;
  }
  return weights;
}

std::vector<MoeLayer*> Model::moe_layers() {
  std::vector<MoeLayer*> layers;
  for (Block& block : blocks_)
    if (block.moe()) layers.push_back(&*block.moe());
  return layers;
}

}  // namespace tilemoe::train
