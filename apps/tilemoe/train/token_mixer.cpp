#include "train/token_mixer.h"

#include <cmath>

namespace tilemoe::train {
namespace {

// The first head looks anywhere; the others ever less near.
float slope_of_head(int64_t h) {
  return h == 0 ? 0.f : std::ldexp(1.f, static_cast<int>(-2 * h - 1));
}

double deviation(double scale, int64_t fan_in) {
  return scale / std::sqrt(static_cast<double>(fan_in));
}

}  // namespace

TokenMixer::TokenMixer(const ModelConfig& config, const std::string& name, Sequences capacity,
                       ParameterStore& parameters, Workspace& workspace)
    : config_(config),
      workspace_(workspace),
      filter_(parameters.add_normal(name + "conv.weight", {config.taps, config.width},
                                    ParameterGroup::kOther, deviation(0.5, config.taps))),
      qkv_weight_(parameters.add_normal(name + "attention.qkv.weight",
                                        {3 * config.attention_width(), config.width},
                                        ParameterGroup::kMatrix, deviation(1, config.width))),
      out_weight_(parameters.add_normal(
          name + "attention.out.weight", {config.width, config.attention_width()},
          ParameterGroup::kMatrix, deviation(0.5, config.attention_width()))),
      slopes_(workspace.floats(config.heads)) {
  const int64_t T = capacity.tokens(), d = config.width, D = config.attention_width();
  std::vector<float> slopes;
  for (int64_t h = 0; h < config.heads; ++h) slopes.push_back(slope_of_head(h));
  slopes_.write(slopes);
  if (parameters.initialized()) {
    // Keys begin as queries do, so that a token first finds tokens which follow its like.
    std::vector<float> qkv_weight = qkv_weight_.value.read();
    std::copy_n(qkv_weight.begin(), D * d, qkv_weight.begin() + D * d);
    qkv_weight_.value.write(qkv_weight);
  }
  qkv_ = workspace.floats(T * 3 * D);
  attended_ = workspace.floats(T * D);
  log_sum_ = workspace.floats(T * config.heads);
  dqkv_ = workspace.floats(T * 3 * D);
  dattended_ = workspace.floats(T * D);
  workspace.need_scratch(causal_conv_scratch(capacity, config.taps, d));
  workspace.need_scratch(linear_backward_weight_scratch({T, d, 3 * D}));
  workspace.need_scratch(linear_backward_weight_scratch({T, D, d}));
  workspace.need_scratch(num_threads() * attention_worker_scratch(attention_shape(capacity)));
}

AttentionShape TokenMixer::attention_shape(Sequences sequences) const {
  return {.sequences = sequences, .heads = config_.heads, .head_width = config_.head_width};
}

void TokenMixer::forward(Sequences sequences, ConstFloats u, ConstFloats x, Floats y) {
  const int64_t T = sequences.tokens(), d = config_.width, D = config_.attention_width();
  Operators& operators = workspace_.operators();
  const Floats qkv = qkv_.first(T * 3 * D), attended = attended_.first(T * D);
  operators.causal_conv(sequences, u, filter_.value.span(), config_.taps, x, y);
  operators.linear({T, d, 3 * D}, u, qkv_weight_.value.span(), qkv);
  operators.attention(attention_shape(sequences), slopes_.span(), qkv, attended, log_sum_.span(),
                      workspace_.scratch());
  operators.linear({T, D, d}, attended, out_weight_.value.span(), y, Write::kAdd);
}

void TokenMixer::backward(Sequences sequences, ConstFloats u, ConstFloats dy, Floats du) {
  const int64_t T = sequences.tokens(), d = config_.width, D = config_.attention_width();
  Operators& operators = workspace_.operators();
  const Floats qkv = qkv_.first(T * 3 * D), attended = attended_.first(T * D);
  const Floats dqkv = dqkv_.first(T * 3 * D), dattended = dattended_.first(T * D);
  const Floats scratch = workspace_.scratch();
  operators.linear_backward_input({T, D, d}, dy, out_weight_.value.span(), dattended);
  operators.linear_backward_weight({T, D, d}, dy, attended, out_weight_.gradient.span(), scratch);
  operators.attention_backward(attention_shape(sequences), slopes_.span(), qkv, attended,
                               log_sum_.span(), dattended, dqkv, scratch);
  operators.linear_backward_input({T, d, 3 * D}, dqkv, qkv_weight_.value.span(), du);
  operators.linear_backward_weight({T, d, 3 * D}, dqkv, u, qkv_weight_.gradient.span(), scratch);
  operators.causal_conv_backward(sequences, u, filter_.value.span(), config_.taps, dy, du,
                                 filter_.gradient.span(), scratch);
}

}  // namespace tilemoe::train
