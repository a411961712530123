// The loops of AdamW over one stretch of parameters, on the calling thread.
#pragma once

#include "train/ops/tasks.h"

namespace tilemoe::train {

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

void adamw_update(const AdamWStretch& stretch, const AdamWFactors& factors);

// In float64 beyond short runs: gradients have millions of elements.
double sum_of_squares(const float* values, int64_t size);

}  // namespace tilemoe::train
