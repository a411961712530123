// The sizes that the model's operators take, and the scratch that they need, in floats.
#pragma once

#include "train/ops/tasks.h"

namespace tilemoe::train {

inline constexpr int64_t kByteValues = 256;

// A batch: T = count * length tokens, sequence after sequence.
struct Sequences {
  int64_t count = 0;
  int64_t length = 0;

  int64_t tokens() const { return count * length; }
};

struct LinearShape {
  int64_t rows = 0;
  int64_t in = 0;
  int64_t out = 0;
};

enum class Write { kStore, kAdd };

struct AttentionShape {
  Sequences sequences;
  int64_t heads = 0;
  int64_t head_width = 0;  // w, a multiple of kRowMultiple

  int64_t width() const { return heads * head_width; }  // D
};

struct AdamWStretch {
  int64_t size = 0;  // a multiple of kRowMultiple
  const float* gradient = nullptr;
  float* value = nullptr;
  float* mean = nullptr;
  float* square = nullptr;
};

struct AdamWFactors {
  float gradient_scale = 1;  // of clipping
  float beta1 = 0;
  float beta2 = 0;
  float epsilon = 0;
  float step_size = 0;     // learning rate / (1 - beta1^step)
  float square_scale = 0;  // 1 / (1 - beta2^step)
  float kept = 1;          // 1 - learning rate * weight decay
};

int64_t rms_norm_scratch(int64_t rows, int64_t width);
int64_t causal_conv_scratch(Sequences sequences, int64_t taps, int64_t width);
int64_t attention_worker_scratch(const AttentionShape& shape);  // of each worker
int64_t linear_backward_weight_scratch(const LinearShape& shape);
int64_t bias_gradient_scratch(int64_t rows, int64_t out);

}  // namespace tilemoe::train
