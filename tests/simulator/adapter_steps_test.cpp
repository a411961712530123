// The projections with the second source of their sum, an adapter's rows and factor, on simulated
// GPUs: exact on small whole numbers with NaN around every operand, and with a factor of zeros the
// bits of the step without an adapter.
#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <tuple>
#include <vector>

#include "adapter_problem.h"

namespace tilemoe::test::adapter {
namespace {

void expect_exact(const Case& c) {
  simulate(c.setting);
  Problem problem(c, small);
  problem.expect_exact(problem.run(1));
}

void expect_bits_without_adapter(const Case& c) {
  simulate(c.setting);
  Problem problem(c, fraction);
  const auto& with = problem.run(0);
  const auto& without = problem.run({});
  EXPECT_EQ(bytes_of(with.wide), bytes_of(without.wide));
  EXPECT_EQ(bytes_of(with.A), bytes_of(without.A));
  EXPECT_EQ(bytes_of(with.ds), bytes_of(without.ds));
}

class AdapterStep : public testing::TestWithParam<std::tuple<std::string, Gemm, bool>> {};

enum class Ranks { kAll, kLargest };

// The activations and layouts that select the step's kernels; each with several ranks or with the
// largest, and that one with all tiles.
template <class Check>
void for_each_case(const std::tuple<std::string, Gemm, bool>& param, Ranks which,
                   const Check& check) {
  const auto& [setting, gemm, dense_last] = param;
  const auto run = [&](tilemoe_activation activation, tilemoe_gate_layout layout,
                       tilemoe_dtype dtype, std::vector<int64_t> ranks) {
    SCOPED_TRACE("activation " + std::to_string(activation) + ", layout " + std::to_string(layout));
    if (which == Ranks::kLargest) ranks = {ranks.back()};
    for (const int64_t rank : ranks) {
      SCOPED_TRACE("rank " + std::to_string(rank));
      const bool several_tiles = rank == 72 && layout == TILEMOE_GATE_CONCATENATED;
      Case c{setting, gemm,       activation,
             layout,  dense_last, dtype,
             rank,    rank != 16, several_tiles ? 130 : 36};
      if (rank != ranks.back()) {
        check(c);
        continue;
      }
      simulate(setting);
      for (const cuda::TileConfiguration& tile : Problem(c, small).tiles()) {
        SCOPED_TRACE(std::to_string(tile.block_n) + " columns");
        c.tile = tile;
        check(c);
      }
    }
  };
  run(TILEMOE_REGLU, TILEMOE_GATE_CONCATENATED, TILEMOE_BFLOAT16, {8, 16, 72, 136});
  run(TILEMOE_REGLU, TILEMOE_GATE_CONCATENATED, TILEMOE_FLOAT16, {24});
  if (gemm == Gemm::kDown) return;
  run(TILEMOE_REGLU, TILEMOE_GATE_INTERLEAVED, TILEMOE_BFLOAT16, {16});
  run(TILEMOE_REGLU, TILEMOE_GATE_SPLIT, TILEMOE_BFLOAT16, {72});
  if (gemm == Gemm::kInput) return;
  run(TILEMOE_REGLU, TILEMOE_GATE_INTERLEAVED, TILEMOE_FLOAT16, {24});
  run(TILEMOE_RELU, TILEMOE_GATE_CONCATENATED, TILEMOE_BFLOAT16, {16});
  run(TILEMOE_RELU, TILEMOE_GATE_CONCATENATED, TILEMOE_FLOAT16, {24});
  run(TILEMOE_SWIGLU, TILEMOE_GATE_CONCATENATED, TILEMOE_BFLOAT16, {16});
  run(TILEMOE_SWIGLU, TILEMOE_GATE_INTERLEAVED, TILEMOE_BFLOAT16, {16, 72});
}

TEST_P(AdapterStep, AddsRowsTimesFactors) {
  for_each_case(GetParam(), Ranks::kAll, expect_exact);
}

// In one orientation of the weights, which decides no order of a sum.
class AdapterOfZeros : public AdapterStep {};

TEST_P(AdapterOfZeros, KeepsTheBits) {
  for_each_case(GetParam(), Ranks::kLargest, expect_bits_without_adapter);
}

constexpr Gemm kGemms[] = {Gemm::kUp, Gemm::kDown, Gemm::kActivation, Gemm::kInput};
constexpr const char* kNames[] = {"up", "down", "activation", "input"};

const auto kName = [](const auto& test) {
  return std::get<0>(test.param) + "_" + kNames[static_cast<int>(std::get<1>(test.param))] +
         (std::get<2>(test.param) ? "" : "_transposed");
};

INSTANTIATE_TEST_SUITE_P(, AdapterStep,
                         testing::Combine(testing::ValuesIn(settings()), testing::ValuesIn(kGemms),
                                          testing::Bool()),
                         kName);
INSTANTIATE_TEST_SUITE_P(, AdapterOfZeros,
                         testing::Combine(testing::ValuesIn(settings()), testing::ValuesIn(kGemms),
                                          testing::Values(true)),
                         kName);

TEST(AdapterKernels, AreRun) {
  ChosenKernels kernels;
  for (const std::string& setting : settings())
    for (const Gemm gemm : kGemms)
      for (const bool dense_last : {false, true})
        for_each_case({setting, gemm, dense_last}, Ranks::kLargest, [&](const Case& c) {
          simulate(c.setting);
          Problem(c, small).add_kernel(kernels);
        });
  kernels.expect_all_of(StepTest::kAdapterStep);
}

}  // namespace
}  // namespace tilemoe::test::adapter
