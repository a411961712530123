#include "train/model.h"

#include <cmath>
#include <numeric>

#include "train/ops/cross_entropy.h"
#include "train/ops/linear.h"

namespace tilemoe::train {
namespace {

// Bytes further back count for less at first.
void scale_past_tables(Parameter& embedding, int64_t tables) {
  const int64_t table = embedding.size() / tables;
  for (int64_t j = 1; j < tables; ++j) {
    const float scale = 0.5f / std::sqrt(static_cast<float>(j));
    for (float& value :
         embedding.value.span().subspan(static_cast<size_t>(j * table), static_cast<size_t>(table)))
      value *= scale;
  }
}

}  // namespace

Model::Model(const ModelConfig& config, Sequences capacity, uint64_t seed)
    : config_(config),
      capacity_(capacity),
      parameters_(seed),
      embedding_(parameters_.add_normal("embedding.weight",
                                        {config.embedded_bytes, kByteValues, config.width},
                                        ParameterGroup::kOther, 0.05)),
      head_norm_("head_norm.", config.width, capacity.tokens(), parameters_, workspace_),
      head_(parameters_.add_constant("head.weight", {kByteValues, config.width},
                                     ParameterGroup::kHead, 0.f)),
      head_bias_(parameters_.add_constant("head.bias", {kByteValues}, ParameterGroup::kHead, 0.f)) {
  const int64_t T = capacity.tokens(), d = config.width;
  scale_past_tables(embedding_, config.embedded_bytes);
  for (int64_t layer = 0; layer < config.layers; ++layer)
    blocks_.emplace_back(config_, "blocks." + std::to_string(layer) + ".", capacity, seed,
                         parameters_, workspace_);
  embedded_ = FloatArray(T * d);
  logits_ = FloatArray(T * kByteValues);
  losses_ = FloatArray(T);
  dx_ = FloatArray(T * d);
  du_ = FloatArray(T * d);
  workspace_.need_scratch(linear_backward_weight_scratch({T, d, kByteValues}));
  workspace_.need_scratch(bias_gradient_scratch(T, kByteValues));
  workspace_.allocate();
}

Floats Model::forward(Phase phase, int64_t step, Sequences sequences, ConstBytes inputs) {
  const int64_t T = sequences.tokens(), d = config_.width;
  const Floats embedded = embedded_.first(T * d), logits = logits_.first(T * kByteValues);
  embed(sequences, inputs, embedding_.value.span(), embedded);
  last_ = embedded;
  for (Block& block : blocks_) last_ = block.forward(phase, step, sequences, last_);
  linear({T, d, kByteValues}, head_norm_.forward(last_), head_.value.span(), logits);
  add_bias(head_bias_.value.span(), logits);
  return logits;
}

ConstFloats Model::logits(Sequences sequences, ConstBytes inputs) {
  return forward(Phase::kEvaluate, 0, sequences, inputs);
}

ConstFloats Model::losses(Sequences sequences, ConstBytes inputs, ConstBytes targets) {
  const Floats losses = losses_.first(sequences.tokens());
  cross_entropy(forward(Phase::kEvaluate, 0, sequences, inputs), targets, losses);
  return losses;
}

double Model::loss_and_gradient(Sequences sequences, int64_t step, ConstBytes inputs,
                                ConstBytes targets) {
  const int64_t T = sequences.tokens(), d = config_.width;
  const Floats losses = losses_.first(T), dx = dx_.first(T * d), du = du_.first(T * d);
  const Floats scratch = workspace_.scratch();
  const Floats dlogits = forward(Phase::kTrain, step, sequences, inputs);
  cross_entropy_with_gradient(dlogits, targets, 1.f / static_cast<float>(T), losses);

  bias_gradient(dlogits, head_bias_.gradient.span(), scratch);
  linear_backward_weight({T, d, kByteValues}, dlogits, head_norm_.output(last_),
                         head_.gradient.span(), scratch);
  linear_backward_input({T, d, kByteValues}, dlogits, head_.value.span(), du);
  std::fill(dx.begin(), dx.end(), 0.f);
  head_norm_.backward(last_, du, dx);
  for (auto block = blocks_.rbegin(); block != blocks_.rend(); ++block)
    block->backward(sequences, dx, du);
  embed_backward(sequences, inputs, dx, embedding_.gradient.span());
  return std::accumulate(losses.begin(), losses.end(), 0.0) / static_cast<double>(T);
}

std::vector<MoeLayer*> Model::moe_layers() {
  std::vector<MoeLayer*> layers;
  for (Block& block : blocks_)
    if (block.moe()) layers.push_back(&*block.moe());
  return layers;
}

}  // namespace tilemoe::train
