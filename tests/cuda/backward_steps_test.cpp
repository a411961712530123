// The backward steps on the device against the CPU backend: equal on small whole numbers, close on
// unit-scale data, nothing written outside, the same bits on every run. Every dense row past M is
// NaN, and in some cases also all rows of one expert and the tokens that only it has.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <list>
#include <vector>

#include "core/backend.h"
#include "cuda/core/device.h"
#include "cuda/cuda_backend.h"
#include "cuda/gemm/schedule/sizes.h"
#include "cuda/step_problem.h"

namespace tilemoe::test {
namespace {

// How the GEMMs are launched.
struct Launch {
  int block_turns = 1;
  int32_t workers = 0;

  Tuning tuning(const StepCase& c) const {
    Tuning tuning = tuning_of(c);
    tuning.ctas_per_sm = block_turns;
    return tuning;
  }
};

// Inputs and outputs of the steps. The dH and A' that are read are not those that are written: each
// step has its own inputs, so that its numbers stay small and an error in one step hides no other.
class BackwardProblem : public StepProblem {
 public:
  explicit BackwardProblem(const StepCase& c)
      : StepProblem(c),
        X_(c.dtype(), {source_rows(), c.d}),
        dO_(c.dtype(), {source_rows(), c.d}),
        H_(c.dtype(), {capacity_, width_}),
        scores_(TILEMOE_FLOAT32, {capacity_}),
        dH_in_(c.dtype(), {capacity_, width_}),
        A_scaled_in_(c.dtype(), {capacity_, c.n}),
        dH_(c.dtype(), {capacity_, width_}),
        A_scaled_(c.dtype(), {capacity_, c.n}),
        ds_partial_(TILEMOE_FLOAT32, {ds_groups(c.n) + 1, capacity_}),
        dX_rows_(c.dtype(), {capacity_, c.d}),
        dW1_(gradient_dtype(), {E_, w1_rows_, c.d}, c.has(kW1Transposed)),
        dW1_up_(gradient_dtype(), {E_, c.n, c.d}, c.has(kW1Transposed)),
        dW2_(gradient_dtype(), {E_, c.d, c.n}, c.has(kW2Transposed)) {
    if (c.interleaved_columns())
      for (TwinTensor* t : {&H_, &dH_in_, &dH_}) t->alternate_on_device();
    fill_inputs();
  }

  void run(const Backend& backend, bool on_device, const Launch& launch = {}) {
    std::list<TwinBuffer> scratches;
    const auto scratch_for = [&](const auto& step) -> Scratch {
      const size_t bytes =
          step.scratch_bytes(experts_, {.capacity = capacity_, .workers = launch.workers});
      TwinBuffer& scratch = scratches.emplace_back(bytes);
      return {on_device ? scratch.device() : scratch.host(), bytes};
    };
    const auto place = [&](TwinTensor& t) { return t.on(on_device); };
    const auto up = [&](TwinTensor& t) { return split_ ? place(t) : tilemoe_tensor{}; };
    Rows rows = StepProblem::rows(on_device);
    if (!c_.has(kWithoutScores)) rows.score = static_cast<const float*>(place(scores_).data);
    const auto optional = [&](TwinTensor& t, bool there) {
      return there ? place(t) : tilemoe_tensor{};
    };
    backend.steps.activation_gradient.run(
        {.experts = &experts_,
         .rows = rows,
         .dO = place(dO_),
         .W1 = place(W1_),
         .W2 = place(W2_),
         .H = place(H_),
         .dH = optional(c_.has(kDHOverH) ? H_ : dH_, !c_.has(kWithoutDH)),
         .A_scaled = optional(A_scaled_, !c_.has(kWithoutAScaled)),
         .ds_partial = !c_.has(kWithoutDs) ? static_cast<float*>(place(ds_partial_).data) : nullptr,
         .scratch = scratch_for(backend.steps.activation_gradient),
         .stream = nullptr,
         .tuning = launch.tuning(c_)});
    backend.steps.weight_gradient_2.run({.experts = &experts_,
                                         .rows = rows,
                                         .dO = place(dO_),
                                         .A_scaled = place(A_scaled_in_),
                                         .dW2 = place(dW2_),
                                         .accumulate = c_.has(kAccumulate),
                                         .scratch = scratch_for(backend.steps.weight_gradient_2),
                                         .stream = nullptr,
                                         .tuning = launch.tuning(c_),
                                         .workers = launch.workers});
    backend.steps.input_gradient.run({.experts = &experts_,
                                      .rows = rows,
                                      .dH = place(dH_in_),
                                      .weights = {place(W1_), up(W1_up_), {}, {}},
                                      .dX_rows = place(dX_rows_),
                                      .scratch = scratch_for(backend.steps.input_gradient),
                                      .stream = nullptr,
                                      .tuning = launch.tuning(c_)});
    backend.steps.weight_gradient_1.run({.experts = &experts_,
                                         .rows = rows,
                                         .W1 = place(W1_),
                                         .dH = place(dH_in_),
                                         .X = place(X_),
                                         .dW1 = place(dW1_),
                                         .dW1_up = up(dW1_up_),
                                         .accumulate = c_.has(kAccumulate),
                                         .scratch = scratch_for(backend.steps.weight_gradient_1),
                                         .stream = nullptr,
                                         .tuning = launch.tuning(c_),
                                         .workers = launch.workers});
    if (!on_device) return;
    expect_cuda(cudaDeviceSynchronize(), "the steps");
    for (const TwinBuffer& scratch : scratches) EXPECT_TRUE(scratch.guards_intact());
  }

  std::vector<NamedOutput> outputs() {
    std::vector<NamedOutput> all = {{"dW2", &dW2_}, {"dX~", &dX_rows_}, {"dW1", &dW1_}};
    if (split_) all.push_back({"dW1_up", &dW1_up_});
    if (!c_.has(kWithoutDH)) all.push_back({"dH", c_.has(kDHOverH) ? &H_ : &dH_});
    if (!c_.has(kWithoutAScaled)) all.push_back({"A'", &A_scaled_});
    return all;
  }
  // The smaller of the two weight gradients' maximum numbers of splits of a long expert.
  int32_t min_splits(int32_t workers) const {
    const ScratchSizes sizes{.capacity = capacity_, .workers = workers};
    const int sms = cuda::current_device().sms;
    return std::min(cuda::weight_gradient_1_splits(experts_, sizes, sms),
                    cuda::weight_gradient_2_splits(experts_, sizes, sms));
  }
  TwinTensor& ds_partial() { return ds_partial_; }
  // The partial sums of the rows that exist, group by group.
  std::vector<double> ds(const std::vector<uint8_t>& partial) const {
    std::vector<double> sums;
    for (int64_t group = 0; group < ds_groups(c_.n); ++group)
      for (int64_t r = 0; r < M_; ++r)
        sums.push_back(ds_partial_.at(partial, group * capacity_ + r));
    return sums;
  }
  // Place of the first partial sum that was written although its row does not exist or it was not
  // requested; -1 if none.
  int64_t stray_sum(const std::vector<uint8_t>& partial) const {
    const auto* sums = partial.data() + TwinBuffer::kGuard;
    for (int64_t place = 0; place < ds_partial_.elements(); ++place) {
      const bool wanted =
          !c_.has(kWithoutDs) && place / capacity_ < ds_groups(c_.n) && place % capacity_ < M_;
      const auto* sum = sums + place * static_cast<int64_t>(sizeof(float));
      if (!wanted && std::any_of(sum, sum + sizeof(float),
                                 [](uint8_t byte) { return byte != TwinBuffer::kPoison; }))
        return place;
    }
    return -1;
  }

 private:
  static constexpr int64_t kOwnTokens = 4;  // of the expert whose rows are NaN

  int64_t source_rows() const { return c_.has(kGrouped) ? capacity_ : c_.T + kOwnTokens; }
  tilemoe_dtype gradient_dtype() const {
    return c_.has(kFloatGradients) ? TILEMOE_FLOAT32 : c_.dtype();
  }

  void fill_inputs() {
    const bool spoils = c_.nan_expert >= 0;
    const int64_t nan_begin = spoils ? row_begin(c_.nan_expert) : 0;
    const int64_t nan_end = spoils ? row_begin(c_.nan_expert + 1) : 0;
    const auto spoilt = [&](int64_t row) { return row >= nan_begin && row < nan_end; };
    // Rows past M name no token: reading one would be outside X.
    tokens_.fill([&](int64_t r) {
      if (r >= M_) return 1e9;
      return spoilt(r) ? static_cast<double>(c_.T + random_.below(kOwnTokens))
                       : static_cast<double>(random_.below(c_.T));
    });
    for (TwinTensor* source : {&X_, &dO_})
      source->fill([&](int64_t i) {
        const int64_t row = i / c_.d;
        const bool nan = c_.has(kGrouped) ? row >= M_ || spoilt(row) : row >= c_.T;
        return nan ? NAN : number(2, 1);
      });
    scores_.fill(
        [&](int64_t r) { return r < M_ ? 0.5 * static_cast<double>(1 + random_.below(4)) : NAN; });
    for (TwinTensor* rows : {&H_, &dH_in_, &A_scaled_in_})
      rows->fill([&](int64_t i) {
        const int64_t row = i / rows->host().shape[1];
        return row >= M_ || spoilt(row) ? NAN : number(2, 1);
      });
    fill_weights();
    if (c_.has(kAccumulate))
      for (TwinTensor* dW : {&dW1_, &dW1_up_, &dW2_}) fill(*dW, 8, 1);
  }

  TwinTensor X_, dO_, H_, scores_, dH_in_, A_scaled_in_;
  TwinTensor dH_, A_scaled_, ds_partial_, dX_rows_, dW1_, dW1_up_, dW2_;
};

using BackwardSteps = testing::TestWithParam<StepCase>;

std::vector<std::vector<uint8_t>> run_on_device(BackwardProblem& problem,
                                                const Launch& launch = {}) {
  for (const auto& output : problem.outputs()) output.tensor->buffer().upload();
  problem.run(cuda::backend(), true, launch);
  return device_outputs(problem);
}

TEST_P(BackwardSteps, EqualTheCpus) {
  const StepCase& c = GetParam();
  BackwardProblem problem(c);
  const auto got = run_on_device(problem);
  const auto ds_partial = problem.ds_partial().buffer().download();
  const auto ds = problem.ds(ds_partial);
  problem.run(cpu_backend(), false);
  expect_outputs(problem, got, c);
  EXPECT_EQ(problem.stray_sum(ds_partial), -1);
  if (c.has(kWithoutDs)) return;
  const auto expected = problem.ds(problem.ds_partial().buffer().host_bytes());
  double error = 0, norm = 0;
  for (size_t r = 0; r < ds.size(); ++r) {
    const bool equal = ds[r] == expected[r] || (std::isnan(ds[r]) && std::isnan(expected[r]));
    EXPECT_TRUE(equal || c.has(kUnitScale))
        << "partial sum " << r << " of ds: " << ds[r] << ", expected " << expected[r];
    error += (ds[r] - expected[r]) * (ds[r] - expected[r]);
    norm += expected[r] * expected[r];
  }
  if (c.has(kUnitScale)) {
    EXPECT_LT(std::sqrt(error / norm), 1e-5);
  }
}

TEST_P(BackwardSteps, AreRepeatable) {
  BackwardProblem problem(GetParam());
  const auto first = run_on_device(problem);
  for (int repeat = 0; repeat < 4; ++repeat) expect_bits(problem, run_on_device(problem), first);
}

// Experts that are long enough to be split, in more tiles than the device has SMs.
StepCase long_experts_case(uint32_t flags) {
  return {"cut", kBackward, {1900, 64, 2500, 3, 1700}, 37, 1032, 520, 90, kFloatGradients | flags};
}

// The number of workers determines the splits of sums, and so the bits; the number of clusters that
// compute them does not. The test requests splits for some of the clusters and several for each.
TEST(SplitK, DependsOnTheWorkersAndNotOnTheClusters) {
  const StepCase c = long_experts_case(kUnitScale);
  BackwardProblem problem(c);
  const int32_t clusters = cuda::current_device().sms / 2;
  std::vector<std::vector<std::vector<uint8_t>>> by_workers;
  for (const int32_t workers : {1, clusters / 4, clusters, 2 * clusters, 1000}) {
    SCOPED_TRACE(workers);
    if (workers == 1000) {
      ASSERT_GT(problem.min_splits(workers), 2 * clusters);
    }
    const auto first = run_on_device(problem, {.block_turns = 1, .workers = workers});
    for (const int turns : {1, 2, 3})
      expect_bits(problem, run_on_device(problem, {.block_turns = turns, .workers = workers}),
                  first);
    by_workers.push_back(first);
  }
  expect_bits(problem, run_on_device(problem), by_workers[2]);  // the device's own
  for (size_t i = 0; i < by_workers.size(); ++i)
    for (size_t j = 0; j < i; ++j) EXPECT_NE(by_workers[i], by_workers[j]) << i << ", " << j;
  problem.run(cpu_backend(), false);
  for (const auto& got : by_workers) expect_outputs(problem, got, c);
}

TEST(SplitK, IsExactOnWholeNumbers) {
  for (const uint32_t dtype : {0u, uint32_t{kFloat16}}) {
    const StepCase c = long_experts_case(dtype);
    BackwardProblem problem(c);
    problem.run(cpu_backend(), false);
    for (const int32_t workers : {1, 2, 7, 50, 1000})
      expect_outputs(problem, run_on_device(problem, {.block_turns = 1, .workers = workers}), c);
  }
}

STEP_TESTS(BackwardSteps, kBackward);

}  // namespace
}  // namespace tilemoe::test
