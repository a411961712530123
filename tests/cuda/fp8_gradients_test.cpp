// Activation and input gradient of the fp8 recipe on a GPU: the bits of the CPU backend, which adds in
// the same order, also of large sizes.
#include "fp8_gradients_support.h"

namespace tilemoe::test {
namespace {

constexpr cuda::TileConfiguration kTiles[] = {{128, 256},
                                              {128, 256, cuda::Schedule::kCooperative, 2}};

void check(const Fp8GradientCase& c) {
  Fp8GradientProblem problem(c, verify::cuda_memory());
  expect_equal(problem.run(), Fp8GradientProblem(c, verify::host_memory()).run(), c);
}

class CudaFp8Gradients : public testing::Test {
 protected:
  void SetUp() override {
    if (!std::string_view(tilemoe_cuda_arch()).starts_with("sm90"))
      GTEST_SKIP() << "needs the arch sm90";
  }
};

TEST_F(CudaFp8Gradients, HaveTheBitsOfTheCpu) {
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    for (const tilemoe_activation activation : {TILEMOE_REGLU, TILEMOE_SWIGLU})
      for (const cuda::TileConfiguration& tile : kTiles)
        for (const bool is_split : {true, false})
          check({.n = is_split ? 208 : 256,
                 .dtype = dtype,
                 .activation = activation,
                 .is_split = is_split,
                 .gathers = is_split,
                 .float_scales = !is_split,
                 .tile = tile});
}
TEST_F(CudaFp8Gradients, ReadCodesOfH) {
  for (const tilemoe_dtype dtype : {TILEMOE_BFLOAT16, TILEMOE_FLOAT16})
    for (const tilemoe_activation activation : {TILEMOE_REGLU, TILEMOE_SWIGLU})
      for (const cuda::TileConfiguration& tile : kTiles)
        check({.n = 336,
               .dtype = dtype,
               .activation = activation,
               .float_scales = dtype == TILEMOE_FLOAT16,
               .dH_over_H = activation == TILEMOE_REGLU,
               .H_in_codes = true,
               .tile = tile});
}
TEST_F(CudaFp8Gradients, HaveManyTiles) {
  for (const cuda::TileConfiguration& tile : kTiles)
    for (const bool dH_over_H : {false, true})
      for (const bool H_in_codes : {false, true})
        check({.counts = {2000, 1500, 0, 33, 1025, 900},
               .d = 1040,
               .n = 592,
               .activation = TILEMOE_SWIGLU,
               .dH_over_H = dH_over_H,
               .H_in_codes = H_in_codes,
               .codes_of_dH = true,
               .tile = tile});
  check({.counts = std::vector<int32_t>(300, 7), .d = 144, .n = 80});
}
TEST_F(CudaFp8Gradients, HaveABlockOfColumns) {
  check({.d = 400, .first_column = 128, .columns = 128});
  check({.d = 400, .n = 128, .is_split = false, .first_column = 256});
}
TEST_F(CudaFp8Gradients, HaveLongSums) {
  check({.counts = {3, 130}, .d = 33 * kFp8Tile - 112, .n = 20 * kFp8Tile - 112});
}
TEST_F(CudaFp8Gradients, AreRepeatable) {
  const Fp8GradientCase c{.counts = {700, 0, 129, 1000},
                          .d = 1040,
                          .n = 592,
                          .activation = TILEMOE_SWIGLU,
                          .codes_of_dH = true};
  Fp8GradientProblem problem(c, verify::cuda_memory());
  const Fp8GradientProblem::Outputs first = problem.run();
  for (int repeat = 0; repeat < 20; ++repeat) {
    const Fp8GradientProblem::Outputs again = problem.run();
    EXPECT_TRUE(again.dH == first.dH && again.A_scaled == first.A_scaled && again.dX == first.dX &&
                again.ds == first.ds && again.dH_codes == first.dH_codes);
  }
}

}  // namespace
}  // namespace tilemoe::test
