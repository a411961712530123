#include "train/block.h"

namespace tilemoe::train {

Block::Block(const ModelConfig& config, const std::string& name, Sequences capacity, uint64_t seed,
             ParameterStore& parameters, Workspace& workspace)
    : mixer_norm_(name + "mixer_norm.", config.width, capacity.tokens(), parameters, workspace),
      mixer_(config, name + "mixer.", capacity, parameters, workspace),
      moe_norm_(name + "moe_norm.", config.width, capacity.tokens(), parameters, workspace),
      y_(workspace.floats(capacity.tokens() * config.width)),
      z_(workspace.floats(capacity.tokens() * config.width)) {
  if (config.mode != ExpertsMode::kOff)
    moe_.emplace(config, name + "moe.", capacity.tokens(), seed, parameters, workspace);
}

ConstFloats Block::forward(Phase phase, int64_t step, Sequences sequences, ConstFloats x) {
  const Floats y = y_.first(std::ssize(x)), z = z_.first(std::ssize(x));
  x_ = x;
  mixer_.forward(sequences, mixer_norm_.forward(x), x, y);
  if (!moe_) return y;
  moe_->forward(phase, step, moe_norm_.forward(y), y, z);
  return z;
}

void Block::backward(Sequences sequences, Floats dx, Floats du) {
  const ConstFloats y = y_.first(std::ssize(x_));
  if (moe_) {
    moe_->backward(moe_norm_.output(y), dx, du);
    moe_norm_.backward(y, du, dx);
  }
  mixer_.backward(sequences, mixer_norm_.output(x_), dx, du);
  mixer_norm_.backward(x_, du, dx);
}

}  // namespace tilemoe::train
