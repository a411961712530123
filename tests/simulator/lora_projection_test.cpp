// The step that computes P and Q of low-rank adapters, on simulated GPUs: exact on small whole
// numbers, with NaN around every operand.
#include <gtest/gtest.h>

#include <cmath>
#include <numeric>
#include <string>
#include <tuple>
#include <vector>

#include "cuda/cuda_backend.h"
#include "lora_problem.h"
#include "lora_rows.h"

namespace tilemoe::test {
namespace {

struct Case {
  std::string setting;
  tilemoe_dtype dtype = TILEMOE_BFLOAT16;
  bool gathers = true;
  bool contiguous_rank = false;  // of the factor
  int64_t rank = 16;
  bool has_ends = false;
};

// Or adds the kernel of the step, which then does not run.
void run(const Case& c, ChosenKernels* kernels = nullptr) {
  simulate(c.setting);
  constexpr int64_t kWidth = 136;
  const ExpertRows experts_rows({129, 0, 1, 64, 3}, 70, 37);
  const int64_t E = experts_rows.E, ranks = c.rank + 2 * kMargin;
  const int64_t sources = c.gathers ? experts_rows.T : experts_rows.capacity;

  // NaN: columns next to the source's, the factor's and the output's; rows past the last.
  auto source = PlacedTensor::columns(c.dtype, sources, kWidth, kWidth + 2 * kMargin, kMargin);
  source.fill(
      [&](const Index& i) { return !c.gathers && i[0] >= experts_rows.M ? NAN : whole(i, 1, 2); });
  const std::vector<int64_t> strides = c.contiguous_rank
                                           ? std::vector<int64_t>{ranks * kWidth, 1, ranks}
                                           : std::vector<int64_t>{ranks * kWidth, kWidth, 1};
  PlacedTensor factor(c.dtype, {E, c.rank, kWidth}, strides,
                      c.contiguous_rank ? kMargin : kMargin * kWidth, kMargin * kWidth);
  factor.fill([](const Index& i) { return whole(i, 2, 2); });
  auto out = PlacedTensor::columns(c.dtype, experts_rows.capacity, c.rank, ranks, kMargin);

  Rows rows = experts_rows.rows(c.gathers);
  PlacedTensor ends(TILEMOE_INT32, {E}, {1});
  const auto end_of = [&](int64_t e) {
    return c.has_ends ? experts_rows.begin(e) + experts_rows.count[static_cast<size_t>(e)] / 2
                      : experts_rows.end(e);
  };
  ends.fill([&](const Index& i) { return static_cast<double>(end_of(i[0])); });
  if (c.has_ends) rows.ends = ends.data<int32_t>();

  tilemoe_experts experts{};
  experts.struct_size = sizeof experts;
  experts.dtype = c.dtype, experts.E = E, experts.d = kWidth, experts.n = kWidth;
  experts.rank_1 = static_cast<int32_t>(c.rank);
  const LoraProjection step{.experts = &experts,
                            .rows = rows,
                            .source = source.tensor(),
                            .factor = factor.tensor(),
                            .out = out.tensor(),
                            .scratch = {},
                            .stream = nullptr};
  if (kernels) return kernels->add(step);
  cuda::backend().steps.lora_P1.run(step);
  expect_clean_run();
  const std::vector<double> sources_read = source.values(), factor_read = factor.values();
  out.expect(
      "out",
      [&](const Index& i) {
        return i[0] < experts_rows.M && i[0] < end_of(experts_rows.expert_of(i[0]));
      },
      [&](const Index& i) {
        const int64_t row = experts_rows.source_of(i[0], c.gathers);
        const int64_t expert = experts_rows.expert_of(i[0]);
        const double* const of_source = sources_read.data() + row * kWidth;
        const double* const of_factor = factor_read.data() + (expert * c.rank + i[1]) * kWidth;
        return std::inner_product(of_source, of_source + kWidth, of_factor, 0.0);
      });
}

class LoraPAndQ
    : public testing::TestWithParam<std::tuple<std::string, tilemoe_dtype, bool, bool>> {};

TEST_P(LoraPAndQ, IsExactForEveryRank) {
  const auto& [setting, dtype, gathers, contiguous_rank] = GetParam();
  for (const int64_t rank : {8, 16, 72, 256}) {
    SCOPED_TRACE(rank);
    run({setting, dtype, gathers, contiguous_rank, rank});
  }
}

TEST_P(LoraPAndQ, EndsWhereAPartEnds) {
  const auto& [setting, dtype, gathers, contiguous_rank] = GetParam();
  run({setting, dtype, gathers, contiguous_rank, 24, true});
}

// Both adapters of a split gate.
TEST_P(LoraPAndQ, HasTwoAdaptersRanks) {
  const auto& [setting, dtype, gathers, contiguous_rank] = GetParam();
  if (dtype == TILEMOE_BFLOAT16) run({setting, dtype, gathers, contiguous_rank, 512});
}

TEST(LoraProjectionKernels, AreRun) {
  ChosenKernels kernels;
  for (const std::string& setting : settings())
    for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
      for (const bool gathers : {false, true})
        for (const bool contiguous_rank : {false, true})
          run({setting, dtype, gathers, contiguous_rank}, &kernels);
  kernels.expect_all_of(StepTest::kLoraProjection);
}

std::string name_of(const testing::TestParamInfo<LoraPAndQ::ParamType>& param) {
  const auto& [setting, dtype, gathers, contiguous_rank] = param.param;
  return setting + "_" + tilemoe_dtype_name(dtype) + (gathers ? "_gathered" : "_dense") +
         (contiguous_rank ? "_rank" : "_width");
}

INSTANTIATE_TEST_SUITE_P(, LoraPAndQ,
                         testing::Combine(testing::ValuesIn(settings()),
                                          testing::Values(TILEMOE_BFLOAT16, TILEMOE_FLOAT16),
                                          testing::Bool(), testing::Bool()),
                         name_of);

}  // namespace
}  // namespace tilemoe::test
