// Every combination of layouts and dtypes in which the C interface takes the experts' weights and
// their gradients, and the expected result on every backend.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <optional>
#include <string>
#include <vector>

#include "verify/inputs.h"
#include "verify/number.h"
#include "verify/problem.h"

namespace tilemoe::verify {

// Which of a matrix's two dimensions is contiguous.
enum class Contiguous { kLast, kLastButOne };

struct GradientForm {
  bool present = true;
  bool float32 = false;  // else the experts' dtype
  Contiguous contiguous = Contiguous::kLast;
};

struct WeightLayout {
  GateLayout gate_layout = GateLayout::kConcatenated;
  bool gated = true;
  Contiguous W1 = Contiguous::kLast, W1_up = Contiguous::kLast, W2 = Contiguous::kLast;
  GradientForm dW1 = {}, dW1_up = {}, dW2 = {};

  bool split() const { return gate_layout == GateLayout::kSplit; }
  // The library refuses these on every backend: the CUDA kernels have one major for both parts of
  // W1, and cannot separate gate and up columns of H that W1 has not interleaved.
  bool refused_forward() const { return split() && W1 != W1_up; }
  bool refused_backward() const {
    return refused_forward() ||
           (gate_layout == GateLayout::kInterleaved && dW1.present &&
            dW1.contiguous == Contiguous::kLastButOne && W1 == Contiguous::kLast);
  }
};

inline std::string describe(Contiguous contiguous) {
  return contiguous == Contiguous::kLast ? "rows" : "columns";
}
inline std::string describe(const GradientForm& form) {
  if (!form.present) return "absent";
  return (form.float32 ? "float32 " : "") + describe(form.contiguous);
}
inline std::string describe(const WeightLayout& layout) {
  constexpr const char* kNames[] = {"concatenated", "interleaved", "split"};
  std::string text = layout.gated ? kNames[static_cast<int>(layout.gate_layout)] : "not gated";
  text += ", W1 " + describe(layout.W1) + ", W2 " + describe(layout.W2);
  if (layout.split()) text += ", W1_up " + describe(layout.W1_up);
  text += ", dW1 " + describe(layout.dW1) + ", dW2 " + describe(layout.dW2);
  return layout.split() ? text + ", dW1_up " + describe(layout.dW1_up) : text;
}

// All combinations of W1, W1_up and their gradients. W2 and dW2, which no kernel reads or writes
// together with those, cycle through all of theirs.
inline std::vector<WeightLayout> weight_layouts() {
  constexpr Contiguous kEither[] = {Contiguous::kLast, Contiguous::kLastButOne};
  std::vector<GradientForm> gradients = {{.present = false}};
  for (const bool float32 : {false, true})
    for (const Contiguous contiguous : kEither) gradients.push_back({true, float32, contiguous});

  std::vector<WeightLayout> all;
  const auto add = [&](WeightLayout layout) {
    const size_t i = all.size();
    layout.dW2 = gradients[i % gradients.size()];
    layout.W2 = kEither[i / gradients.size() % 2];
    all.push_back(layout);
  };
  for (const Contiguous W1 : kEither)
    for (const GradientForm& dW1 : gradients) {
      add({.gated = false, .W1 = W1, .dW1 = dW1});
      add({.W1 = W1, .dW1 = dW1});
      add({.gate_layout = GateLayout::kInterleaved, .W1 = W1, .dW1 = dW1});
      for (const Contiguous W1_up : kEither)
        for (const GradientForm& dW1_up : gradients)
          add({.gate_layout = GateLayout::kSplit,
               .W1 = W1,
               .W1_up = W1_up,
               .dW1 = dW1,
               .dW1_up = dW1_up});
    }
  return all;
}

// A layer of small whole numbers, whose gradients are exact in float32 whatever their order of
// summation, so that every layout has the same ones.
class WeightLayoutProblem {
 public:
  WeightLayoutProblem(Case shape, DType dtype, bool gated, bool accumulate, Memory& memory)
      : memory_(memory), case_(std::move(shape)), accumulate_(accumulate) {
    case_.dtype = dtype;
    case_.data = Data::kIntegers;
    case_.activation = gated ? Activation::kReGLU : Activation::kReLU;
    case_.accumulate_dW = accumulate;
    case_.float32_dW = true;
    inputs_ = make_inputs(case_, 7);
    problem_.emplace(inputs_, memory);
    problem_->run();
    expected_ = problem_->computed();
  }

  // Runs forward and backward in this layout. A refused call must have written nothing.
  void check(const WeightLayout& layout) {
    SCOPED_TRACE(std::string(case_.dtype == DType::kFloat32    ? "float32"
                             : case_.dtype == DType::kBFloat16 ? "bfloat16"
                                                               : "float16") +
                 (accumulate_ ? ", added: " : ": ") + describe(layout));
    const int64_t E = case_.E, d = case_.d, n = case_.n;
    const int64_t w1_rows = layout.split() ? n : case_.h_width();
    GuardedTensor W1 = weight({E, w1_rows, d}, layout.W1);
    GuardedTensor W1_up = weight({E, n, d}, layout.W1_up);
    GuardedTensor W2 = weight({E, d, n}, layout.W2);
    write_up(layout, inputs_.weights.W1, W1, W1_up);
    W2.write(inputs_.weights.W2);

    GuardedTensor dW1 = gradient({E, w1_rows, d}, layout.dW1);
    GuardedTensor dW1_up = gradient({E, n, d}, layout.dW1_up);
    GuardedTensor dW2 = gradient({E, d, n}, layout.dW2);
    for (GuardedTensor* each : {&dW1, &dW1_up, &dW2}) each->poison();
    problem_->poison();
    if (accumulate_) {
      write_up(layout, inputs_.dW_before.W1, dW1, dW1_up);
      dW2.write(inputs_.dW_before.W2);
    }
    const std::vector<uint64_t> before = {dW1.fingerprint(), dW1_up.fingerprint(),
                                          dW2.fingerprint()};
    problem_->route();

    Experts experts = problem_->experts();
    experts.gate_layout = layout.gate_layout;
    Weights weights;
    weights.W1 = W1.view(), weights.W2 = W2.view();
    if (layout.split()) weights.W1_up = W1_up.view();
    ForwardArgs forward = problem_->forward_args();
    forward.weights = weights;
    if (layout.refused_forward()) {
      EXPECT_TRUE(is_refused([&] { experts.forward(forward); }));
      EXPECT_TRUE(problem_->H_is_poisoned());
      // Backward of an H that another layout wrote.
      forward.weights = problem_->forward_args().weights;
      problem_->experts().forward(forward);
    } else {
      experts.forward(forward);
      EXPECT_EQ(problem_->computed()[kO], expected_[kO]);
    }

    BackwardArgs backward = problem_->backward_args();
    backward.weights = weights;
    backward.dweights = {};
    if (layout.dW1.present) backward.dweights.W1 = dW1.view();
    if (layout.split() && layout.dW1_up.present) backward.dweights.W1_up = dW1_up.view();
    if (layout.dW2.present) backward.dweights.W2 = dW2.view();
    const bool refused = layout.refused_backward();
    if (refused) {
      EXPECT_TRUE(is_refused([&] { experts.backward(backward); }));
    } else {
      experts.backward(backward);
    }

    EXPECT_EQ(problem_->damage(), std::vector<std::string>());
    EXPECT_TRUE(W1.gaps_intact() && W1_up.gaps_intact() && W2.gaps_intact());
    EXPECT_TRUE(dW1.gaps_intact()) << "bytes outside dW1 were written";
    EXPECT_TRUE(dW1_up.gaps_intact()) << "bytes outside dW1_up were written";
    EXPECT_TRUE(dW2.gaps_intact()) << "bytes outside dW2 were written";
    const bool writes_up = layout.split() && layout.dW1_up.present;
    EXPECT_TRUE((layout.dW1.present && !refused) || dW1.fingerprint() == before[0]);
    EXPECT_TRUE((writes_up && !refused) || dW1_up.fingerprint() == before[1]);
    EXPECT_TRUE((layout.dW2.present && !refused) || dW2.fingerprint() == before[2]);
    if (refused) return;
    EXPECT_EQ(problem_->computed()[kDX], expected_[kDX]);
    const std::vector<float> of_W1 = up_rows(layout, expected_[kDW1], false);
    if (layout.dW1.present) expect_values("dW1", dW1, of_W1);
    if (writes_up) expect_values("dW1_up", dW1_up, up_rows(layout, expected_[kDW1], true));
    if (layout.dW2.present) expect_values("dW2", dW2, expected_[kDW2]);
  }

 private:
  GuardedTensor weight(std::vector<int64_t> shape, Contiguous contiguous) const {
    return {memory_, case_.dtype, std::move(shape), layout_of(contiguous)};
  }
  GuardedTensor gradient(std::vector<int64_t> shape, const GradientForm& form) const {
    return {memory_, form.float32 ? DType::kFloat32 : case_.dtype, std::move(shape),
            layout_of(form.contiguous)};
  }
  static MatrixLayout layout_of(Contiguous contiguous) {
    return {.padded = true, .transposed = contiguous == Contiguous::kLastButOne};
  }

  // The rows of W1, or with `up` of W1_up, from those of (E, h_width, d), gate rows first.
  std::vector<float> up_rows(const WeightLayout& layout, const std::vector<float>& values,
                             bool up) const {
    const int64_t n = case_.n, width = case_.h_width();
    std::vector<float> rows;
    for (int64_t e = 0; e < case_.E; ++e)
      for (int64_t row = 0; row < (layout.split() ? n : width); ++row) {
        const int64_t from = layout.gate_layout == GateLayout::kInterleaved ? row / 2 + row % 2 * n
                             : up                                           ? row + n
                                                                            : row;
        const auto first = values.begin() + (e * width + from) * case_.d;
        rows.insert(rows.end(), first, first + case_.d);
      }
    return rows;
  }
  void write_up(const WeightLayout& layout, const std::vector<float>& values, GuardedTensor& W1,
                GuardedTensor& W1_up) const {
    W1.write(up_rows(layout, values, false));
    if (layout.split()) W1_up.write(up_rows(layout, values, true));
  }

  template <class Call>
  static bool is_refused(const Call& call) {
    try {
      call();
    } catch (const Error& error) {
      return error.status() == Status::kInvalidArgument;
    }
    return false;
  }

  static void expect_values(const char* name, const GuardedTensor& tensor,
                            const std::vector<float>& expected) {
    const std::vector<float> got = tensor.read();
    const auto dtype = static_cast<DType>(tensor.view().dtype);
    ASSERT_EQ(got.size(), expected.size());
    for (size_t i = 0; i < got.size(); ++i)
      ASSERT_EQ(static_cast<double>(got[i]), round_to(dtype, static_cast<double>(expected[i])))
          << name << " at " << i;
  }

  Memory& memory_;
  Case case_;
  bool accumulate_;
  Inputs inputs_;
  std::optional<Problem> problem_;
  Computed expected_;
};

// The entries of the table for which `takes` is true.
template <class Takes>
void expect_weight_layouts(const Case& shape, const std::vector<DType>& dtypes, Memory& memory,
                           const Takes& takes) {
  for (const DType dtype : dtypes)
    for (const bool gated : {false, true})
      for (const bool accumulate : {false, true}) {
        std::optional<WeightLayoutProblem> problem;
        for (const WeightLayout& layout : weight_layouts()) {
          if (layout.gated != gated || !takes(layout)) continue;
          if (!problem) problem.emplace(shape, dtype, gated, accumulate, memory);
          problem->check(layout);
        }
      }
}

inline void expect_every_weight_layout(const Case& shape, const std::vector<DType>& dtypes,
                                       Memory& memory) {
  expect_weight_layouts(shape, dtypes, memory, [](const WeightLayout&) { return true; });
}

}  // namespace tilemoe::verify
