// The forward steps on the device against the CPU backend: equal bits on small whole numbers, close
// on unit-scale data, nothing written outside, the same bits on every run.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <vector>

#include "core/backend.h"
#include "cuda/cuda_backend.h"
#include "cuda/step_problem.h"

namespace tilemoe::test {
namespace {

// Inputs and outputs of the three steps. The outputs H, A and Y are no inputs: each step has its
// own inputs, so that its numbers stay small and an error in one step hides no other.
class ForwardProblem : public StepProblem {
 public:
  explicit ForwardProblem(const StepCase& c)
      : StepProblem(c),
        X_(c.dtype(), {c.has(kGrouped) ? capacity_ : c.T, c.d}),
        b1_(c.dtype(), {E_, w1_rows_}),
        b1_up_(c.dtype(), {E_, c.n}),
        b2_(c.dtype(), {E_, c.d}),
        A_in_(c.dtype(), {capacity_, c.n}),
        H_(c.dtype(), {capacity_, width_}),
        A_(c.dtype(), {capacity_, c.n}),
        Y_(c.dtype(), {capacity_, c.d}) {
    if (c.interleaved_columns()) H_.alternate_on_device();
    fill_inputs();
  }

  void run(const Backend& backend, bool on_device) {
    std::vector<std::byte> scratch;
    const auto scratch_for = [&](const auto& step) -> Scratch {
      scratch.resize(step.scratch_bytes(experts_, {.capacity = capacity_}));
      return {scratch.data(), scratch.size()};
    };
    const auto place = [&](TwinTensor& t) { return t.on(on_device); };
    const auto optional = [&](TwinTensor& t, bool there) {
      return there ? place(t) : tilemoe_tensor{};
    };
    backend.steps.up_projection.run(
        {.experts = &experts_,
         .rows = rows(on_device),
         .X = place(X_),
         .weights = {place(W1_), optional(W1_up_, split_), optional(b1_, c_.has(kBiases)),
                     optional(b1_up_, c_.has(kBiases) && split_)},
         .H = optional(H_, !c_.has(kWithoutH)),
         .A = place(A_),
         .scratch = scratch_for(backend.steps.up_projection),
         .stream = nullptr,
         .tuning = tuning_of(c_)});
    backend.steps.down_projection.run({.experts = &experts_,
                                       .rows = rows(on_device),
                                       .A = place(A_in_),
                                       .W2 = place(W2_),
                                       .b2 = optional(b2_, c_.has(kBiases)),
                                       .Y = place(Y_),
                                       .scratch = scratch_for(backend.steps.down_projection),
                                       .stream = nullptr,
                                       .tuning = tuning_of(c_)});
  }

  std::vector<NamedOutput> outputs() {
    return {{"H", &H_, !c_.has(kWithoutH)}, {"A", &A_}, {"Y", &Y_}};
  }

 private:
  void fill_inputs() {
    // Rows past M name no token: reading one would be outside X.
    tokens_.fill([&](int64_t r) {
      return r < M_ ? static_cast<double>(random_.below(std::max<int64_t>(c_.T, 1))) : 1e9;
    });
    fill(X_, 2, 1);
    if (c_.has(kGrouped)) spoil(X_, M_ * c_.d, X_.elements());
    fill_weights();
    fill(b1_, 4, 1);
    fill(b1_up_, 4, 1);
    fill(b2_, 4, 1);
    fill(A_in_, 2, 1);
    if (c_.nan_expert >= 0) spoil_expert();
  }

  // NaN in one expert's weights, and in every row past M.
  void spoil_expert() {
    for (TwinTensor* W : {&W1_, &W2_}) {
      const int64_t matrix = W->elements() / E_;
      spoil(*W, c_.nan_expert * matrix, (c_.nan_expert + 1) * matrix);
    }
    spoil(A_in_, M_ * c_.n, capacity_ * c_.n);
  }
  void spoil(TwinTensor& tensor, int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i)
      verify::store(static_cast<DType>(c_.dtype()), tensor.buffer().host(), i, NAN);
    tensor.buffer().upload();
  }

  TwinTensor X_, b1_, b1_up_, b2_, A_in_, H_, A_, Y_;
};

using ForwardSteps = testing::TestWithParam<StepCase>;

TEST_P(ForwardSteps, EqualTheCpus) {
  ForwardProblem problem(GetParam());
  problem.run(cuda::backend(), true);
  expect_cuda(cudaDeviceSynchronize(), "the steps");
  const auto got = device_outputs(problem);
  problem.run(cpu_backend(), false);
  expect_outputs(problem, got, GetParam());
}

TEST_P(ForwardSteps, AreRepeatable) {
  ForwardProblem problem(GetParam());
  problem.run(cuda::backend(), true);
  expect_cuda(cudaDeviceSynchronize(), "the steps");
  const auto first = device_outputs(problem);
  for (int repeat = 0; repeat < 20; ++repeat) problem.run(cuda::backend(), true);
  expect_cuda(cudaDeviceSynchronize(), "the steps");
  expect_bits(problem, device_outputs(problem), first);
}

STEP_TESTS(ForwardSteps, kForward);

// Each token's rows, with and without addend; pairs that have no row are left out.
TEST(Combine, SumsInTheOrderOfPairs) {
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    for (const int64_t K : {1, 3, 8, 11}) {
      SCOPED_TRACE(K);
      const int64_t T = 101, d = 264, E = 16, capacity = T * K;
      tilemoe_experts experts{};
      experts.struct_size = sizeof experts;
      experts.dtype = dtype;
      experts.d = d, experts.n = 8, experts.E = E;
      TwinTensor Y(dtype, {capacity, d}), addend(dtype, {T, d}), O(dtype, {T, d});
      TwinTensor pair_row(TILEMOE_INT32, {T * K}), score(TILEMOE_FLOAT32, {capacity});
      TwinTensor offsets(TILEMOE_INT32, {E + 1});
      verify::Random random(3, 2);
      for (TwinTensor* t : {&Y, &addend})
        t->fill([&](int64_t) { return static_cast<double>(random.below(9)) - 4; });
      score.fill([&](int64_t) { return static_cast<double>(random.below(8)) / 4; });
      pair_row.fill([&](int64_t i) {
        return i % 5 == 3 ? -1.0 : static_cast<double>(random.below(capacity));
      });
      offsets.fill([&](int64_t e) { return static_cast<double>(e * capacity / E); });
      for (const bool adds : {false, true}) {
        const auto combine = [&](const Backend& backend, bool on_device) {
          const auto place = [&](TwinTensor& t) { return on_device ? t.device() : t.host(); };
          tilemoe_routing routing{};
          routing.spec.kind = TILEMOE_ROUTING_TOP_K;
          routing.spec.T = T, routing.spec.E = E, routing.spec.K = K;
          routing.spec.pairs = routing.spec.capacity = capacity;
          routing.offsets = static_cast<int32_t*>(place(offsets).data);
          routing.pair_row = static_cast<int32_t*>(place(pair_row).data);
          routing.row_score = static_cast<float*>(place(score).data);
          backend.steps.combine.run({.experts = &experts,
                                     .routing = &routing,
                                     .row_values = place(Y),
                                     .scale_by_score = true,
                                     .addend = adds ? place(addend) : tilemoe_tensor{},
                                     .out = place(O),
                                     .stream = nullptr});
        };
        combine(cuda::backend(), true);
        expect_cuda(cudaDeviceSynchronize(), "combine");
        combine(cpu_backend(), false);
        EXPECT_EQ(O.buffer().download(), O.buffer().host_bytes());
      }
    }
}

}  // namespace
}  // namespace tilemoe::test
