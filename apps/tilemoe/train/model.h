// A causal language model of bytes: an embedding, residual blocks, a norm and a head.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "train/block.h"
#include "train/model_config.h"
#include "train/named_array.h"

namespace tilemoe::train {

class Model {
 public:
  // `capacity`: the largest batch it will see, and the longest sequence. All memory is taken here.
  Model(const ModelConfig& config, Sequences capacity, uint64_t seed);
  Model(const Model&) = delete;
  Model& operator=(const Model&) = delete;

  // The gradient of the mean loss plus the routers' losses, into the parameters. Returns the mean
  // loss alone, nats a byte. `step` is the training step, which stochastic rounding reads.
  double loss_and_gradient(Sequences sequences, int64_t step,
                           ConstBytes inputs,    // (sequences, past() + length)
                           ConstBytes targets);  // (T)

  // The loss of each token, nats, with top-K routing; valid until the next call.
  ConstFloats losses(Sequences sequences,
                     ConstBytes inputs,    // (sequences, past() + length)
                     ConstBytes targets);  // (T)

  // (T, 256), with top-K routing; valid until the next call.
  ConstFloats logits(Sequences sequences,
                     ConstBytes inputs);  // (sequences, past() + length)

  ParameterStore& parameters() { return parameters_; }
  Operators& operators() { return *operators_; }
  // All that the model's answers depend on: the parameters, then the selection biases.
  std::vector<NamedArray> weights();
  // The layers' experts, first layer first; none if they are off.
  std::vector<MoeLayer*> moe_layers();
  Sequences capacity() const { return capacity_; }
  // Bytes that the inputs of a sequence begin with before its first token: W - 1.
  int64_t past() const { return config_.embedded_bytes - 1; }

 private:
  Floats forward(Phase phase, int64_t step, Sequences sequences, ConstBytes inputs);
  ConstBytes put_targets(ConstBytes targets);
  // The first elements of an array, readable by the host.
  ConstFloats on_host(const FloatArray& array, int64_t count);

  const ModelConfig config_;
  const Sequences capacity_;
  const std::unique_ptr<Operators> operators_;
  ParameterStore parameters_;
  Workspace workspace_;
  Parameter& embedding_;      // (W, 256, d)
  std::deque<Block> blocks_;  // never moved: layers refer to each other's memory
  NormLayer head_norm_;
  Parameter& head_;         // (256, d)
  Parameter& head_bias_;    // (256)
  Array<uint8_t> inputs_;   // (sequences, past() + length), of the last forward
  Array<uint8_t> targets_;  // (T)
  FloatArray embedded_;     // (T, d)
  FloatArray logits_;       // (T, 256), then their gradient
  FloatArray losses_;       // (T)
  FloatArray dx_, du_;      // (T, d)
  ConstFloats last_;        // (T, d), what the last block returned
  std::vector<float> host_;
};

}  // namespace tilemoe::train
