// The step that computes the gradients of an adapter's factors, on simulated GPUs: exact on numbers
// whose sums are, with NaN around every operand.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/core/device.h"
#include "cuda/cuda_backend.h"
#include "cuda/gemm/schedule/sizes.h"
#include "lora_problem.h"
#include "lora_rows.h"

namespace tilemoe::test {
namespace {

constexpr int64_t kInputWidth = 136, kColumns = 72;  // of the input, and of a part of dOut

struct Case {
  std::string setting;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  bool gathers_input = true;
  int64_t rank = 16;
  Output dA = {};
  std::vector<Output> dB = {{}};
  bool accumulate = false;
  std::vector<int32_t> counts = {129, 0, 1, 64};
  int32_t workers = 0;
};

class Problem {
 public:
  explicit Problem(const Case& c)
      : c_(c),
        rows_(c.counts, 70, 37),
        input_(PlacedTensor::columns(c.dtype, source_rows(c.gathers_input), kInputWidth,
                                     kInputWidth + 2 * kMargin, kMargin)),
        dOut_(PlacedTensor::columns(c.dtype, source_rows(!c.gathers_input), columns(),
                                    columns() + 2 * kMargin, kMargin)),
        P_(rank_columns()),
        Q_(rank_columns()),
        dA_(c.dA.place(c.dtype, rows_.E, c.rank, kInputWidth, c.accumulate)) {
    for (const Output& one : c.dB)
      dB_.push_back(one.place(c.dtype, rows_.E, kColumns, c.rank, c.accumulate));
    experts_.struct_size = sizeof experts_;
    experts_.dtype = c.dtype, experts_.E = rows_.E;
    experts_.activation = TILEMOE_SWIGLU;
    experts_.d = c.gathers_input ? kInputWidth : columns();
    experts_.n = c.gathers_input ? kColumns : kInputWidth;
    (c.gathers_input ? experts_.rank_1 : experts_.rank_2) = static_cast<int32_t>(c.rank);
    fill(input_, c.gathers_input, 1, 2);
    fill(dOut_, !c.gathers_input, 2, 2);
    fill(Q_, false, 3, 2);
    fill(P_, false, 4, 100);  // scaled, these have more bits than a 16-bit number
  }

  ScratchSizes sizes() const { return {.capacity = rows_.capacity, .workers = c_.workers}; }
  const tilemoe_experts& experts() const { return experts_; }

  void run() {
    const auto& row = c_.gathers_input ? cuda::backend().steps.lora_gradient_1
                                       : cuda::backend().steps.lora_gradient_2;
    const auto bytes = static_cast<int64_t>(row.scratch_bytes(experts_, sizes()));
    const PlacedTensor scratch(TILEMOE_FLOAT32, {bytes / 4}, {1});
    LoraGradient step{};
    step.experts = &experts_, step.rows = rows_.rows(true);
    step.input = input_.tensor(), step.dOut = dOut_.tensor();
    step.gathers_input = c_.gathers_input;
    step.P = P_.tensor(), step.Q = Q_.tensor(), step.scale = kScale;
    if (c_.dA.wanted) step.dA = dA_->tensor();
    step.parts = static_cast<int>(dB_.size());
    for (size_t p = 0; p < dB_.size(); ++p)
      step.part[p] = {c_.dB[p].wanted ? dB_[p]->tensor() : tilemoe_tensor{}, first(p)};
    step.accumulate = c_.accumulate;
    step.scratch = {scratch.tensor().data, static_cast<size_t>(bytes)};
    step.workers = c_.workers;
    row.run(step);
    expect_clean_run();
  }

  // Adds the kernels of the GEMMs that `run` starts; an input that is not gathered is dense there.
  void add_kernels(ChosenKernels& kernels) const {
    std::vector<tilemoe_tensor> outputs = {dA_->tensor()};
    for (const auto& one : dB_) outputs.push_back(one->tensor());
    for (const tilemoe_tensor& out : outputs) {
      cuda::WeightGradient gemm{};
      gemm.experts = &experts_, gemm.rows = rows_.rows(true), gemm.of_factor = true;
      gemm.part[gemm.parts++].out = c_.gathers_input ? out : transposed(out);
      gemm.dense_columns = gemm.part[0].out.shape[1];
      kernels.add(gemm);
    }
  }

  void expect_outputs() {
    const auto input = [&](int64_t row, int64_t j) {
      return input_.at(rows_.source_of(row, c_.gathers_input), j);
    };
    const auto Q = [&](int64_t row, int64_t i) { return Q_.at(row, i); };
    const auto P = [&](int64_t row, int64_t j) {
      const double score = c_.gathers_input ? 1 : rows_.score.at({row, 0, 0});
      return verify::round_to(static_cast<DType>(c_.dtype),
                              static_cast<float>(kScale * score) * P_.at(row, j));
    };
    expect("dA", *dA_, c_.dA, kInputWidth, sums_over_rows(c_.rank, kInputWidth, Q, input));
    for (size_t p = 0; p < dB_.size(); ++p) {
      const auto dOut = [&](int64_t row, int64_t i) {
        return dOut_.at(rows_.source_of(row, !c_.gathers_input), first(p) + i);
      };
      expect("dB", *dB_[p], c_.dB[p], c_.rank, sums_over_rows(kColumns, c_.rank, dOut, P));
    }
  }

 private:
  static constexpr float kScale = 0.75f;

  int64_t source_rows(bool gathers) const { return gathers ? rows_.T : rows_.capacity; }
  int64_t columns() const { return kColumns * static_cast<int64_t>(c_.dB.size()) + kMargin; }
  int64_t first(size_t part) const { return kMargin + kColumns * static_cast<int64_t>(part); }
  PlacedTensor rank_columns() const {
    return PlacedTensor::columns(c_.dtype, rows_.capacity, c_.rank, c_.rank + 2 * kMargin, kMargin);
  }
  void fill(PlacedTensor& tensor, bool gathered, int64_t salt, int64_t range) const {
    tensor.fill(
        [&](const Index& i) { return !gathered && i[0] >= rows_.M ? NAN : whole(i, salt, range); });
  }
  // Sums of left(row, i) * right(row, j) over each expert's rows: (E, m, n). Each element is read
  // once per row, since the reading takes longer than the product.
  template <class Left, class Right>
  std::vector<double> sums_over_rows(int64_t m, int64_t n, const Left& left,
                                     const Right& right) const {
    std::vector<double> sums(static_cast<size_t>(rows_.E * m * n));
    std::vector<double> of_right(static_cast<size_t>(n));
    for (int64_t row = 0; row < rows_.M; ++row) {
      for (int64_t j = 0; j < n; ++j) of_right[static_cast<size_t>(j)] = right(row, j);
      double* sum = sums.data() + rows_.expert_of(row) * m * n;
      for (int64_t i = 0; i < m; ++i) {
        const double of_left = left(row, i);
        for (const double factor : of_right) *sum++ += of_left * factor;
      }
    }
    return sums;
  }
  // `sums` (E, rows, columns), added to what `out` has.
  void expect(const char* name, PlacedTensor& out, const Output& kind, int64_t columns,
              const std::vector<double>& sums) {
    const int64_t rows = static_cast<int64_t>(sums.size()) / (rows_.E * columns);
    out.expect(
        name, [&](const Index&) { return kind.wanted; },
        [&](const Index& i) {
          return sums[static_cast<size_t>((i[0] * rows + i[1]) * columns + i[2])] +
                 (c_.accumulate ? out.at(i) : 0);
        });
  }

  const Case c_;
  const ExpertRows rows_;
  tilemoe_experts experts_{};
  PlacedTensor input_, dOut_, P_, Q_;
  std::unique_ptr<PlacedTensor> dA_;
  std::vector<std::unique_ptr<PlacedTensor>> dB_;
};

void run(const Case& c) {
  simulate(c.setting);
  Problem problem(c);
  problem.run();
  problem.expect_outputs();
}

class LoraGradientStep
    : public testing::TestWithParam<std::tuple<std::string, tilemoe_dtype, bool>> {
 protected:
  static Case with_rank(int64_t rank) {
    const auto& [setting, dtype, gathers_input] = GetParam();
    return {.setting = setting, .dtype = dtype, .gathers_input = gathers_input, .rank = rank};
  }
};

TEST_P(LoraGradientStep, IsExactForEveryRank) {
  for (const int64_t rank : {8, 16, 72, 256}) {
    SCOPED_TRACE(rank);
    Case c = with_rank(rank);
    c.dB = {{}, {}};
    run(c);
  }
}

// A case for every kind of output.
template <class Visit>
void for_each_kind(const Case& any, const Visit& visit) {
  for (const bool is_float32 : {false, true})
    for (const bool contiguous_rows : {false, true})
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << is_float32 << contiguous_rows << accumulate);
        Case c = any;
        c.dA = {true, is_float32, contiguous_rows};
        c.dB = {c.dA};
        c.accumulate = accumulate;
        c.counts = {65, 0, 3};
        visit(c);
      }
}

TEST_P(LoraGradientStep, WritesEveryKindOfOutput) {
  for_each_kind(with_rank(24), run);
}

TEST(LoraGradientKernels, AreRun) {
  ChosenKernels kernels;
  for (const std::string& setting : settings())
    for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
      for (const bool gathers_input : {false, true})
        for_each_kind({.setting = setting, .dtype = dtype, .gathers_input = gathers_input},
                      [&](const Case& c) {
                        simulate(c.setting);
                        Problem(c).add_kernels(kernels);
                      });
  kernels.expect_all_of(StepTest::kLoraGradient);
}

TEST_P(LoraGradientStep, LeavesWhatIsNotWanted) {
  for (const bool dA : {false, true})
    for (const bool gate : {false, true}) {
      Case c = with_rank(16);
      c.dA.wanted = dA;
      c.dB = {{.wanted = gate}, {.wanted = !gate && dA}};
      c.counts = {5, 70};
      run(c);
    }
}

TEST_P(LoraGradientStep, TakesPartsOfTwoKinds) {
  Case c = with_rank(16);
  c.dB = {{true, false, false}, {true, true, true}};
  c.counts = {5, 70};
  run(c);
}

TEST_P(LoraGradientStep, SplitsLongExperts) {
  for (const int64_t rank : {16, 200}) {
    SCOPED_TRACE(rank);
    Case c = with_rank(rank);
    c.dB = {{}, {}};
    c.counts = {640, 0, 70, 300};
    c.workers = 7;
    simulate(c.setting);
    const Problem problem(c);
    ASSERT_GE(cuda::lora_gradient_splits(problem.experts(), problem.sizes(), 132), 2);
    run(c);
  }
}

TEST_P(LoraGradientStep, IsZeroWithoutRows) {
  Case c = with_rank(16);
  c.counts = {0, 0};
  run(c);
}

std::string name_of(const testing::TestParamInfo<LoraGradientStep::ParamType>& param) {
  const auto& [setting, dtype, gathers_input] = param.param;
  return setting + "_" + tilemoe_dtype_name(dtype) + (gathers_input ? "_W1" : "_W2");
}

INSTANTIATE_TEST_SUITE_P(, LoraGradientStep,
                         testing::Combine(testing::ValuesIn(settings()),
                                          testing::Values(TILEMOE_BFLOAT16, TILEMOE_FLOAT16),
                                          testing::Bool()),
                         name_of);

}  // namespace
}  // namespace tilemoe::test
