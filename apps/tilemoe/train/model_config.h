// The sizes of the model that is trained, and the routing of its tokens.
#pragma once

#include <cstdint>
#include <limits>

#include "tilemoe/layer.h"
#include "train/memory.h"

namespace tilemoe::train {

// The layer in the experts' place; all but kRouted are for comparison.
enum class ExpertsMode {
  kRouted,
  kDense,  // one feed-forward of the same active width, K * n, for every token
  kOff,    // nothing: their output is zero
};

struct RoutingConfig {
  bool rounded = false;                           // else top-K
  Scoring scoring = Scoring::kSoftmaxOverChosen;  // of top-K
  Rounding rounding = Rounding::kNearest;
  int64_t m = 128;  // rounded: rows an expert gets are multiples of it
  // Sigmoid scorings: by how much a step moves an expert's selection bias, up if it had fewer
  // tokens than the mean, down if more (DeepSeek-V3, arXiv 2412.19437, section 2.1.2).
  float bias_rate = 1e-3f;
  float balance_loss = 0.02f;  // coefficients of the router's losses
  float z_loss = 1e-4f;

  bool has_selection_bias() const {
    return !rounded && (scoring == Scoring::kSigmoid || scoring == Scoring::kSigmoidRenormalized);
  }
};

struct ModelConfig {
  int64_t layers = 2;
  int64_t width = 192;         // d, a multiple of kRowMultiple
  int64_t embedded_bytes = 4;  // W: a token's own byte and those before it
  int64_t experts = 32;        // E
  int64_t top_k = 2;           // K
  int64_t expert_width = 128;  // n, a multiple of 8
  int64_t heads = 4;
  int64_t head_width = 16;  // a multiple of kRowMultiple
  int64_t taps = 4;         // of the convolution
  Activation activation = Activation::kSwiGLU;
  ExpertsMode mode = ExpertsMode::kRouted;
  RoutingConfig routing;
  Device device = Device::kCpu;
  // Numbers that the parameters may have: a model that is built for a checkpoint's tensors cannot
  // be larger than they are.
  int64_t max_parameters = std::numeric_limits<int64_t>::max();
  // Without training the model has no gradients and no first values: a checkpoint has the weights.
  bool trained = true;
  // The memory of the model's arrays; the device's without one.
  Memory* memory = nullptr;

  int64_t attention_width() const { return heads * head_width; }  // D
};

}  // namespace tilemoe::train
