// A short convolution and attention, which move information between the tokens of a sequence.
#pragma once

#include <string>

#include "train/model_config.h"
#include "train/parameters.h"
#include "train/workspace.h"

namespace tilemoe::train {

class TokenMixer {
 public:
  TokenMixer(const ModelConfig& config, const std::string& name, Sequences capacity,
             ParameterStore& parameters, Workspace& workspace);

  // y = x + convolution(u) + attention(u) Wo^T; all (T, d)
  void forward(Sequences sequences, ConstFloats u, ConstFloats x, Floats y);
  // du from dy, and the parameters' gradients; u as in forward
  void backward(Sequences sequences, ConstFloats u, ConstFloats dy, Floats du);

 private:
  AttentionShape attention_shape(Sequences sequences) const;

  const ModelConfig& config_;
  const Workspace& workspace_;
  Parameter& filter_;      // (taps, d)
  Parameter& qkv_weight_;  // (3D, d)
  Parameter& out_weight_;  // (d, D)
  FloatArray slopes_;      // (heads)
  FloatArray qkv_;         // (T, 3D)
  FloatArray attended_;    // (T, D)
  FloatArray log_sum_;     // (sequences, heads, length)
  FloatArray dqkv_;        // (T, 3D)
  FloatArray dattended_;   // (T, D)
};

}  // namespace tilemoe::train
