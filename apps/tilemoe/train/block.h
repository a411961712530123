// One residual block of the model: y = x + mixer(norm(x)), z = y + experts(norm(y)).
#pragma once

#include <optional>
#include <string>

#include "train/moe_layer.h"
#include "train/norm_layer.h"
#include "train/token_mixer.h"

namespace tilemoe::train {

class Block {
 public:
  Block(const ModelConfig& config, const std::string& name, Sequences capacity, uint64_t seed,
        ParameterStore& parameters, Workspace& workspace);

  // x (T, d), which must live until backward -> z (T, d), valid until the next forward
  ConstFloats forward(Phase phase, int64_t step, Sequences sequences, ConstFloats x);
  // From dz to dx, in place. `du` is scratch; both (T, d).
  void backward(Sequences sequences, Floats dx, Floats du);

  std::optional<MoeLayer>& moe() { return moe_; }

 private:
  NormLayer mixer_norm_;
  TokenMixer mixer_;
  NormLayer moe_norm_;
  std::optional<MoeLayer> moe_;  // none if the experts are off
  FloatArray y_, z_;             // (T, d)
  ConstFloats x_;                // of the last forward
};

}  // namespace tilemoe::train
