// Common code of the tests of the forward and the backward steps: a case's rows, experts and
// weights on the host and on the device, and the comparison of the steps' outputs.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstdint>
#include <numeric>
#include <vector>

#include "core/backend.h"
#include "cuda/compare.h"
#include "cuda/cuda_backend.h"
#include "cuda/device_tensors.h"
#include "cuda/step_cases.h"

namespace tilemoe::test {

// Inputs that are in both.
class StepProblem {
 public:
  struct NamedOutput {
    const char* name;
    TwinTensor* tensor;
    bool wanted = true;  // if not, it stays as it was
  };

 protected:
  explicit StepProblem(const StepCase& c)
      : c_(c),
        E_(static_cast<int64_t>(c.counts.size())),
        M_(row_begin(E_)),
        capacity_(M_ + c.spare_rows),
        split_(c.has(kSplit)),
        width_(tilemoe_activation_gated(c.activation) != 0 ? 2 * c.n : c.n),
        w1_rows_(split_ ? c.n : width_),
        offsets_(TILEMOE_INT32, {E_ + 1}),
        tokens_(TILEMOE_INT32, {capacity_}),
        W1_(c.dtype(), {E_, w1_rows_, c.d}, c.has(kW1Transposed)),
        W1_up_(c.dtype(), {E_, c.n, c.d}, c.has(kW1Transposed)),
        W2_(c.dtype(), {E_, c.d, c.n}, c.has(kW2Transposed)) {
    experts_.struct_size = sizeof experts_;
    experts_.dtype = c.dtype();
    experts_.d = c.d, experts_.n = c.n, experts_.E = E_;
    experts_.activation = c.activation;
    experts_.gate_layout = c.gate_layout();
    experts_.clamp = c.clamp, experts_.alpha = c.alpha, experts_.up_shift = c.up_shift;
    offsets_.fill([&](int64_t e) { return static_cast<double>(row_begin(e)); });
  }
  ~StepProblem() = default;

  int64_t row_begin(int64_t e) const {
    return std::accumulate(c_.counts.begin(), c_.counts.begin() + e, int64_t{0});
  }
  Rows rows(bool on_device) {
    const auto* token = static_cast<const int32_t*>(tokens_.on(on_device).data);
    return {.E = E_,
            .capacity = capacity_,
            .offsets = static_cast<const int32_t*>(offsets_.on(on_device).data),
            .token = c_.has(kGrouped) ? nullptr : token};
  }

  // Up to `range`, or of the size of `scale`.
  double number(int64_t range, double scale) {
    if (c_.has(kUnitScale)) return scale * random_.normal();
    return static_cast<double>(random_.below(2 * range + 1) - range);
  }
  void fill(TwinTensor& tensor, int64_t range, double scale) {
    tensor.fill([&](int64_t) { return number(range, scale); });
  }
  void fill_weights() {
    fill(W1_, 1, 1 / std::sqrt(static_cast<double>(c_.d)));
    fill(W1_up_, 1, 1 / std::sqrt(static_cast<double>(c_.d)));
    fill(W2_, 1, 1 / std::sqrt(static_cast<double>(c_.n)));
  }

  const StepCase c_;
  int64_t E_, M_, capacity_;
  bool split_;
  int64_t width_, w1_rows_;
  verify::Random random_{7, 1};
  tilemoe_experts experts_{};
  TwinTensor offsets_, tokens_, W1_, W1_up_, W2_;
};

// The device's contents of every output, guards included.
template <class Problem>
std::vector<std::vector<uint8_t>> device_outputs(Problem& problem) {
  std::vector<std::vector<uint8_t>> bytes;
  for (const auto& output : problem.outputs()) bytes.push_back(output.tensor->buffer().download());
  return bytes;
}

template <class Problem>
void expect_bits(Problem& problem, const std::vector<std::vector<uint8_t>>& got,
                 const std::vector<std::vector<uint8_t>>& expected) {
  size_t i = 0;
  for (const auto& output : problem.outputs()) {
    EXPECT_EQ(got[i], expected[i]) << output.name;
    ++i;
  }
}

// Compares them with the host's.
template <class Problem>
void expect_outputs(Problem& problem, const std::vector<std::vector<uint8_t>>& got,
                    const StepCase& c) {
  size_t i = 0;
  for (const auto& output : problem.outputs()) {
    SCOPED_TRACE(output.name);
    expect_equal(*output.tensor, got[i++], !c.has(kUnitScale) || !output.wanted,
                 c.has(kFloat16) ? 1e-4 : 1e-3);
  }
}

// A case's tile, if it names one.
inline Tuning tuning_of(const StepCase& c) {
  return {.tile = c.tile ? &*c.tile : nullptr};
}

}  // namespace tilemoe::test
