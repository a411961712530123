// The same bits on every run, for every number of threads, on a busy machine, and while another
// thread is in the library.
#include <algorithm>
#include <thread>

#include "layer_support.h"

namespace tilemoe::verify {
namespace {

class Threads {
 public:
  explicit Threads(int count) { check(tilemoe_set_num_threads(count)); }
  ~Threads() { tilemoe_set_num_threads(0); }
  Threads(const Threads&) = delete;
  Threads& operator=(const Threads&) = delete;
};

Computed run(const Case& test_case) {
  Problem problem(make_inputs(test_case, 11));
  problem.run();
  return problem.computed();
}

class Determinism : public testing::TestWithParam<Case> {};

TEST_P(Determinism, SameBitsOnAnyThreads) {
  Computed expected;
  {
    const Threads one(1);
    expected = run(GetParam());
  }
  for (int threads : {2, 3, 5}) {
    const Threads some(threads);
    expect_same_bits(expected, run(GetParam()));
  }
}

TEST_P(Determinism, SameBitsOnABusyMachine) {
  const Threads more_than_cores(3);
  Problem problem(make_inputs(GetParam(), 11));
  problem.run();
  const Computed expected = problem.computed();
  const std::unique_ptr<OtherWork> other_work = host_memory().do_other_work();
  for (int i = 0; i < (reduced_run() ? 2 : 8); ++i) {
    problem.run();
    expect_same_bits(expected, problem.computed());
  }
}

std::vector<Case> determinism_cases() {
  if (reduced_run())
    return named_cases({"biases", "general", "rounded-nearest", "lora"}, {"bfloat16"});
  return named_cases(
      {"wide", "biases", "zipf", "general", "rounded-nearest", "grouped", "dW-added", "transposed",
       "one-expert-has-all", "lora", "lora-split", "lora-long-experts"},
      {"float32", "bfloat16"});
}

INSTANTIATE_TEST_SUITE_P(, Determinism, testing::ValuesIn(determinism_cases()), test_name);

// Also run with oneDNN's kernels for AVX2, which sum the columns that fill no vector in another order.
TEST(WeightLayouts, GiveTheSameBits) {
  Case one{.T = 53, .d = 40, .n = 24, .E = 5, .K = 2};
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16}) {
    one.dtype = dtype;
    one.W1_transposed = one.W2_transposed = false;
    const Computed expected = run(one);
    for (const Output output : {kO, kDW1, kDW2})
      EXPECT_TRUE(std::any_of(expected[output].begin(), expected[output].end(), [](float value) {
        return value != 0;
      })) << output_name(output);
    one.W1_transposed = one.W2_transposed = true;
    expect_same_bits(expected, run(one));
  }
}

TEST(DeterminismOfManyRuns, SameBitsAThousandTimes) {
  const Threads threads(2);
  Problem problem(make_inputs(named_case("one-token/float32"), 11));
  problem.run();
  const Computed expected = problem.computed();
  for (int i = 0; i < (reduced_run() ? 20 : 1000); ++i) {
    problem.run();
    expect_same_bits(expected, problem.computed());
    if (testing::Test::HasFailure()) return;
  }
}

TEST(ConcurrentCalls, GiveTheBitsOfSeparateOnes) {
  const Threads threads(3);
  const std::vector<Case> cases =
      named_cases({"biases", "general", "rounded-nearest"}, {"float32", "bfloat16"});
  std::vector<Computed> expected;
  for (const Case& one : cases) expected.push_back(run(one));
  std::vector<std::thread> callers;
  for (size_t caller = 0; caller < 2; ++caller)
    callers.emplace_back([&, caller] {
      for (size_t i = 0; i < (reduced_run() ? 1 : 4) * cases.size(); ++i) {
        const size_t which = (i + caller) % cases.size();
        expect_same_bits(expected[which], run(cases[which]));
      }
    });
  for (std::thread& caller : callers) caller.join();
}

}  // namespace
}  // namespace tilemoe::verify
