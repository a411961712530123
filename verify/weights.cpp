#include "weights.h"

#include <algorithm>

namespace tilemoe::verify {

WeightTensors::WeightTensors(const Case& test_case, DType dtype, Parts parts, Memory& memory)
    : case_(test_case), E_(test_case.E), n_(test_case.n), h_width_(test_case.h_width()) {
  const int64_t d = test_case.d;
  const bool split = test_case.gate_layout == GateLayout::kSplit;
  const int64_t rows = split ? n_ : h_width_;
  const MatrixLayout bias{.padded = test_case.padded};
  const MatrixLayout W1{.padded = test_case.padded, .transposed = test_case.W1_transposed};
  const MatrixLayout W2{.padded = test_case.padded, .transposed = test_case.W2_transposed};
  const auto make = [&](std::optional<GuardedTensor>& tensor, std::vector<int64_t> shape,
                        MatrixLayout layout) {
    tensor.emplace(memory, dtype, std::move(shape), layout);
  };
  if (parts.W1) make(W1_, {E_, rows, d}, W1);
  if (parts.W1 && split) make(W1_up_, {E_, n_, d}, W1);
  if (parts.W2) make(W2_, {E_, d, n_}, W2);
  if (parts.b1) make(b1_, {E_, rows}, bias);
  if (parts.b1 && split) make(b1_up_, {E_, n_}, bias);
  if (parts.b2) make(b2_, {E_, d}, bias);
}

Weights WeightTensors::view() const {
  const WeightGradients all = gradients();
  return {all.W1, all.W1_up, all.W2, all.b1, all.b1_up, all.b2};
}

WeightGradients WeightTensors::gradients() const {
  const auto of = [](const std::optional<GuardedTensor>& tensor) {
    return tensor ? tensor->view() : Tensor();
  };
  return {of(W1_), of(W1_up_), of(W2_), of(b1_), of(b1_up_), of(b2_)};
}

RowPlace place_of(const Case& test_case, int64_t row) {
  if (!test_case.gated() || test_case.gate_layout == GateLayout::kConcatenated) return {false, row};
  const bool up = row >= test_case.n;
  const int64_t column = up ? row - test_case.n : row;
  if (test_case.gate_layout == GateLayout::kSplit) return {up, column};
  return {false, 2 * column + (up ? 1 : 0)};
}

void WeightTensors::write_up(std::optional<GuardedTensor>& main, std::optional<GuardedTensor>& up,
                             const std::vector<float>& values, int64_t width) {
  if (!main) return;
  std::vector<float> parts[2] = {std::vector<float>(static_cast<size_t>(main->elements())),
                                 std::vector<float>(up ? static_cast<size_t>(up->elements()) : 0)};
  const int64_t rows = up ? n_ : h_width_;
  for (int64_t e = 0; e < E_; ++e)
    for (int64_t row = 0; row < h_width_; ++row) {
      const RowPlace place = place_of(case_, row);
      std::copy_n(values.begin() + (e * h_width_ + row) * width, width,
                  parts[place.in_up].begin() + (e * rows + place.row) * width);
    }
  main->write(parts[0]);
  if (up) up->write(parts[1]);
}

std::vector<float> WeightTensors::read_up(const std::optional<GuardedTensor>& main,
                                          const std::optional<GuardedTensor>& up,
                                          int64_t width) const {
  if (!main) return {};
  const std::vector<float> parts[2] = {main->read(), up ? up->read() : std::vector<float>()};
  std::vector<float> values(static_cast<size_t>(E_ * h_width_ * width));
  const int64_t rows = up ? n_ : h_width_;
  for (int64_t e = 0; e < E_; ++e)
    for (int64_t row = 0; row < h_width_; ++row) {
      const RowPlace place = place_of(case_, row);
      std::copy_n(parts[place.in_up].begin() + (e * rows + place.row) * width, width,
                  values.begin() + (e * h_width_ + row) * width);
    }
  return values;
}

void WeightTensors::write(const ExpertValues& values) {
  write_up(W1_, W1_up_, values.W1, W1_ ? W1_->view().shape[2] : 0);
  write_up(b1_, b1_up_, values.b1, 1);
  if (W2_) W2_->write(values.W2);
  if (b2_) b2_->write(values.b2);
}

ExpertValues WeightTensors::read() const {
  return {.W1 = read_up(W1_, W1_up_, W1_ ? W1_->view().shape[2] : 0),
          .W2 = W2_ ? W2_->read() : std::vector<float>(),
          .b1 = read_up(b1_, b1_up_, 1),
          .b2 = b2_ ? b2_->read() : std::vector<float>()};
}

std::vector<std::pair<const char*, GuardedTensor*>> WeightTensors::tensors() {
  std::vector<std::pair<const char*, GuardedTensor*>> present;
  const auto add = [&](const char* name, std::optional<GuardedTensor>& tensor) {
    if (tensor) present.emplace_back(name, &*tensor);
  };
  add("W1", W1_), add("W1_up", W1_up_), add("W2", W2_);
  add("b1", b1_), add("b1_up", b1_up_), add("b2", b2_);
  return present;
}

}  // namespace tilemoe::verify
