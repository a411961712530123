// The steps that compute Q of an adapter and the gradient of its B, on simulated GPUs: exact on
// numbers whose sums are, with NaN around every operand.
#include <gtest/gtest.h>

#include <cmath>
#include <memory>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/cuda_backend.h"
#include "lora_problem.h"

namespace tilemoe::test {
namespace {

constexpr float kScale = 0.75f;
constexpr int64_t kSpareRows = 33;  // of each expert: with fewer, dB is a step of its own

struct Case {
  std::string setting;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  bool gathers = true;  // dO of W2's adapter, not dH of W1's
  int64_t rank = 16;
  int64_t columns = 72;  // of a part of dOut
  std::vector<Output> dB = {{}};
  bool contiguous_rank = false;  // of the factor
  bool accumulate = false;
  std::vector<int32_t> counts = {129, 0, 1, 64};
};

class Problem {
 public:
  explicit Problem(const Case& c)
      : c_(c),
        rows_(c.counts, kSpareRows * static_cast<int64_t>(c.counts.size()), 37),
        width_(c.columns * static_cast<int64_t>(c.dB.size()) + kMargin),
        dOut_(PlacedTensor::columns(c.dtype, c.gathers ? rows_.T : rows_.capacity, width_,
                                    width_ + 2 * kMargin, kMargin)),
        P_(rank_columns()),
        Q_(rank_columns()),
        factor_(c.dtype, {rows_.E, c.rank, width_},
                c.contiguous_rank ? std::vector<int64_t>{c.rank * width_ + kMargin, 1, c.rank}
                                  : std::vector<int64_t>{c.rank * width_ + kMargin, width_, 1},
                kMargin, kMargin) {
    dOut_.fill(
        [&](const Index& i) { return !c.gathers && i[0] >= rows_.M ? NAN : whole(i, 1, 2); });
    P_.fill([&](const Index& i) { return i[0] >= rows_.M ? NAN : whole(i, 2, 100); });
    factor_.fill([](const Index& i) { return whole(i, 3, 2); });
    for (const Output& one : c.dB)
      dB_.push_back(one.place(c.dtype, rows_.E, c.columns, c.rank, c.accumulate));
    experts_.struct_size = sizeof experts_;
    experts_.dtype = c.dtype, experts_.E = rows_.E;
    experts_.activation = TILEMOE_SWIGLU;
    experts_.d = width_, experts_.n = width_ / 2;
    (c.gathers ? experts_.rank_2 : experts_.rank_1) = static_cast<int32_t>(c.rank);
  }

  void run() {
    const auto& steps = cuda::backend().steps;
    const auto& row = c_.gathers ? steps.lora_Q2 : steps.lora_Q1;
    const auto bytes =
        static_cast<int64_t>(row.scratch_bytes(experts_, ScratchSizes{.capacity = rows_.capacity}));
    const PlacedTensor scratch(TILEMOE_FLOAT32, {bytes / 4}, {1});
    LoraGradient gradient{};
    gradient.experts = &experts_, gradient.rows = rows_.rows(true);
    gradient.dOut = dOut_.tensor(), gradient.gathers_input = !c_.gathers;
    gradient.P = P_.tensor(), gradient.scale = kScale, gradient.accumulate = c_.accumulate;
    gradient.parts = static_cast<int>(dB_.size());
    for (size_t p = 0; p < dB_.size(); ++p)
      gradient.part[p] = {c_.dB[p].wanted ? dB_[p]->tensor() : tilemoe_tensor{}, first(p)};
    row.run({.experts = &experts_,
             .rows = rows_.rows(c_.gathers),
             .source = dOut_.tensor(),
             .factor = factor_.tensor(),
             .out = Q_.tensor(),
             .scratch = {scratch.tensor().data, static_cast<size_t>(bytes)},
             .stream = nullptr,
             .gradient = gradient});
    expect_clean_run();
  }

  void expect_outputs() {
    const std::vector<double> dOut = dOut_.values(), factor = factor_.values();
    const std::vector<double> P = scaled_P();
    const auto row_of_dOut = [&](int64_t row) {
      return dOut.data() + rows_.source_of(row, c_.gathers) * width_;
    };
    Q_.expect(
        "Q", [&](const Index& i) { return i[0] < rows_.M; },
        [&](const Index& i) {
          const double* const of_dOut = row_of_dOut(i[0]);
          const double* const of_factor =
              factor.data() + (rows_.expert_of(i[0]) * c_.rank + i[1]) * width_;
          return std::inner_product(of_dOut, of_dOut + width_, of_factor, 0.0);
        });
    for (size_t p = 0; p < dB_.size(); ++p)
      dB_[p]->expect(
          "dB", [&](const Index&) { return c_.dB[p].wanted; },
          [&](const Index& i) {
            double sum = c_.accumulate ? dB_[p]->at(i) : 0;
            for (int64_t row = rows_.begin(i[0]), end = rows_.end(i[0]); row < end; ++row)
              sum +=
                  row_of_dOut(row)[first(p) + i[1]] * P[static_cast<size_t>(row * c_.rank + i[2])];
            return sum;
          });
  }

 private:
  int64_t first(size_t part) const { return kMargin + c_.columns * static_cast<int64_t>(part); }
  // P times the scale, and times the scores if dO is gathered: (M, rank).
  std::vector<double> scaled_P() const {
    std::vector<double> scaled;
    for (int64_t row = 0; row < rows_.M; ++row) {
      const double score = c_.gathers ? rows_.score.at({row, 0, 0}) : 1;
      for (int64_t j = 0; j < c_.rank; ++j)
        scaled.push_back(verify::round_to(static_cast<DType>(c_.dtype),
                                          static_cast<float>(kScale * score) * P_.at(row, j)));
    }
    return scaled;
  }
  PlacedTensor rank_columns() const {
    return PlacedTensor::columns(c_.dtype, rows_.capacity, c_.rank, c_.rank + 2 * kMargin, kMargin);
  }

  const Case c_;
  const ExpertRows rows_;
  const int64_t width_;
  tilemoe_experts experts_{};
  PlacedTensor dOut_, P_, Q_, factor_;
  std::vector<std::unique_ptr<PlacedTensor>> dB_;
};

void run(const Case& c) {
  simulate(c.setting);
  Problem problem(c);
  problem.run();
  problem.expect_outputs();
}

class LoraOutputGradient
    : public testing::TestWithParam<std::tuple<std::string, tilemoe_dtype, bool>> {
 protected:
  static Case with_rank(int64_t rank) {
    const auto& [setting, dtype, gathers] = GetParam();
    return {.setting = setting, .dtype = dtype, .gathers = gathers, .rank = rank};
  }
};

// Of ranks that one kernel serves, and one that takes two.
TEST_P(LoraOutputGradient, IsExactForEveryRank) {
  for (const int64_t rank : {8, 16, 24, 32, 40}) {
    SCOPED_TRACE(rank);
    Case c = with_rank(rank);
    c.dB = {{}, {}};
    c.contiguous_rank = rank % 16 == 0;
    run(c);
  }
}

TEST_P(LoraOutputGradient, AddsSlicesOfColumns) {
  for (const int64_t rank : {16, 32}) {
    SCOPED_TRACE(rank);
    Case c = with_rank(rank);
    c.columns = 1096;
    c.counts = {19, 0, 1};
    run(c);
  }
}

TEST_P(LoraOutputGradient, AddsChunksOfRows) {
  Case c = with_rank(16);
  c.counts = {1200, 0, 70, 512};
  run(c);
}

TEST_P(LoraOutputGradient, WritesEveryKindOfOutput) {
  for (const bool is_float32 : {false, true})
    for (const bool contiguous_rows : {false, true})
      for (const bool accumulate : {false, true}) {
        SCOPED_TRACE(testing::Message() << is_float32 << contiguous_rows << accumulate);
        Case c = with_rank(24);
        c.dB = {{true, is_float32, contiguous_rows}, {accumulate, true, false}};
        c.accumulate = accumulate;
        c.counts = {35, 0, 3};
        run(c);
      }
}

TEST_P(LoraOutputGradient, IsZeroWithoutRows) {
  Case c = with_rank(16);
  c.counts = {0, 0};
  run(c);
}

std::string name_of(const testing::TestParamInfo<LoraOutputGradient::ParamType>& param) {
  const auto& [setting, dtype, gathers] = param.param;
  return setting + "_" + tilemoe_dtype_name(dtype) + (gathers ? "_W2" : "_W1");
}

INSTANTIATE_TEST_SUITE_P(, LoraOutputGradient,
                         testing::Combine(testing::ValuesIn(settings()),
                                          testing::Values(TILEMOE_BFLOAT16, TILEMOE_FLOAT16),
                                          testing::Bool()),
                         name_of);

}  // namespace
}  // namespace tilemoe::test
