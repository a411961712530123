// AdamW (arXiv 1711.05101) after clipping the gradient to a global norm, in float32.
#pragma once

#include <string>
#include <vector>

#include "train/parameters.h"

namespace tilemoe::train {

struct AdamWConfig {
  double learning_rate = 4.5e-3;
  double head_learning_rate = 1e-2;
  double beta1 = 0.9;
  double beta2 = 0.95;
  double epsilon = 1e-8;
  double weight_decay = 0.2;  // of matrices alone
  double clip = 0.5;          // largest norm of all gradients together; 0 never clips
};

class AdamW {
 public:
  AdamW(const AdamWConfig& config, ParameterStore& parameters);

  // Update number `step` (the first is 1), with every learning rate times `factor`. Returns the
  // norm of all gradients before clipping; if that is not finite, nothing is updated.
  double update(int64_t step, double factor);

  // The running mean and the running mean square of each parameter's gradient.
  struct Moments {
    Parameter* parameter;
    FloatArray mean;
    FloatArray square;
  };
  std::vector<Moments>& moments() { return moments_; }

 private:
  AdamWConfig config_;
  Operators& operators_;
  std::vector<Moments> moments_;
  std::vector<ConstFloats> gradients_;
};

}  // namespace tilemoe::train
