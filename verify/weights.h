// The experts' weights, or their gradients, as tensors in a case's own layout.
#pragma once

#include <optional>
#include <utility>
#include <vector>

#include "inputs.h"
#include "memory.h"
#include "tilemoe/layer.h"

namespace tilemoe::verify {

// The place of row i, gate rows first, of an expert's W1 or b1 in the case's layout.
struct RowPlace {
  bool in_up;
  int64_t row;
};
RowPlace place_of(const Case& test_case, int64_t row);

class WeightTensors {
 public:
  // Which of the tensors exist; W1 stands for W1_up too, b1 for b1_up.
  struct Parts {
    bool W1, W2, b1, b2;
  };
  WeightTensors(const Case& test_case, DType dtype, Parts parts, Memory& memory);

  Weights view() const;
  WeightGradients gradients() const;
  void write(const ExpertValues& values);
  ExpertValues read() const;  // absent tensors are empty

  // The existing tensors, by the names of tilemoe_weights.
  std::vector<std::pair<const char*, GuardedTensor*>> tensors();

 private:
  void write_up(std::optional<GuardedTensor>& main, std::optional<GuardedTensor>& up,
                const std::vector<float>& values, int64_t width);
  std::vector<float> read_up(const std::optional<GuardedTensor>& main,
                             const std::optional<GuardedTensor>& up, int64_t width) const;

  const Case case_;
  int64_t E_, n_, h_width_;
  std::optional<GuardedTensor> W1_, W1_up_, W2_, b1_, b1_up_, b2_;
};

}  // namespace tilemoe::verify
