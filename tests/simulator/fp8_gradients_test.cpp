// Activation and input gradient of the fp8 recipe on a simulated Hopper: the bits of the CPU backend,
// which adds in the same order, from every kernel.
#include <cuda_runtime_api.h>

#include <algorithm>
#include <optional>

#include "core/fp8.h"
#include "core/numbers.h"
#include "cuda/ops/table.h"
#include "cuda/plan.h"
#include "fp8_gradients_support.h"
#include "simulator/machine/machine.h"
#include "simulator/setting.h"

namespace tilemoe::test {
namespace {

class Fp8Gradients : public testing::Test {
 protected:
  void SetUp() override {
    static uint64_t seed = 0;  // a repeated test has another one
    const simulator::Setting& setting = simulator::setting_of("sm90");
    machine().set_device(setting.device);
    ASSERT_EQ(tilemoe_set_cuda_arch(setting.arch), TILEMOE_SUCCESS) << tilemoe_last_error();
    machine().set_seed(++seed);
  }
  static simulator::Machine& machine() { return simulator::Machine::instance(); }

  static Fp8GradientProblem::Outputs expected(const Fp8GradientCase& c) {
    return Fp8GradientProblem(c, verify::host_memory()).run();
  }
  static void check(const Fp8GradientCase& c) {
    Fp8GradientProblem problem(c, verify::cuda_memory());
    const Fp8GradientProblem::Outputs got = problem.run();
    for (const simulator::Finding& finding : machine().take_findings())
      ADD_FAILURE() << c << ": " << describe(finding);
    expect_equal(got, expected(c), c);
  }
};

// The maxima are all numbers of 16 bits, infinity included.
TEST(Fp8Factors, NeedNoDivisionsForPowersOfTwo) {
  const auto check = [](float amax, tilemoe_dtype dtype) {
    const float factor = fp8_power_factor(amax);
    ASSERT_EQ(factor, fp8_factor(amax, largest_of(dtype), true)) << amax;
    ASSERT_EQ(inverse_of_power(factor), 1.f / factor) << amax;
  };
  for (uint32_t bits = 0; bits <= 0x7f80; ++bits)
    check(to_float(BFloat16{static_cast<uint16_t>(bits)}), TILEMOE_BFLOAT16);
  for (uint32_t bits = 0; bits <= 0x7c00; ++bits)
    check(to_float(Float16{static_cast<uint16_t>(bits)}), TILEMOE_FLOAT16);
}

// Each row of the table, by a case that is made of it.
TEST_F(Fp8Gradients, HaveTheBitsOfTheCpu) {
  using enum cuda::Activations;
  int rows = 0;
  for (const cuda::instances::Row& row : cuda::instances::kRows) {
    const cuda::Variant& variant = row.key.variant;
    const bool is_activation = row.key.gemm == cuda::GemmName::kActivationGradient;
    const bool is_input = row.key.gemm == cuda::GemmName::kInputGradient;
    if (!is_fp8(variant.recipe) || !(is_activation || is_input)) continue;
    SCOPED_TRACE("row " + std::to_string(++rows));
    const Fp8GradientCase c{
        .dtype = variant.recipe == cuda::RecipeName::kFp8BF16 ? TILEMOE_BFLOAT16 : TILEMOE_FLOAT16,
        .activation = variant.activations == kSwiGLU ? TILEMOE_SWIGLU : TILEMOE_REGLU,
        .tile = row.tile};
    check(c);
    if (is_activation)
      for (const bool dH_over_H : {false, true}) {
        Fp8GradientCase of_codes = c;
        of_codes.H_in_codes = true, of_codes.dH_over_H = dH_over_H;
        of_codes.float_scales = dH_over_H;
        check(of_codes);
      }
    const Fp8GradientProblem problem(c, verify::cuda_memory());
    const auto expect_row = [&](const auto& step) {
      EXPECT_TRUE(cuda::key_of(step) == row.key && *cuda::kernel_of(step) == row.tile);
    };
    if (is_activation)
      expect_row(problem.activation_gradient());
    else
      expect_row(problem.input_gradient());
  }
  EXPECT_EQ(rows, 7);
}
TEST_F(Fp8Gradients, HaveManyTilesOfCodes) {
  check(
      {.counts = {300, 1, 0, 257, 129}, .d = 400, .n = 336, .dH_over_H = true, .H_in_codes = true});
  check({.counts = {0, 0}, .H_in_codes = true});
}
// Several tiles for a CTA, and row blocks with and without a partner in a cluster.
TEST_F(Fp8Gradients, HaveManyTiles) {
  check({.counts = {300, 1, 0, 257, 129}, .d = 400, .n = 336, .dH_over_H = true});
}
TEST_F(Fp8Gradients, ReadConcatenatedWeights) {
  check({.n = 256, .is_split = false});
  check({.n = 128, .is_split = false, .float_scales = true});
}
TEST_F(Fp8Gradients, HaveABlockOfColumns) {
  check({.d = 400, .first_column = 128, .columns = 128});
  check({.d = 400, .n = 128, .is_split = false, .first_column = 256});
}
// By the epilogue of SwiGLU's kernels, in groups of one and of two slices; else by a kernel of its own.
TEST_F(Fp8Gradients, WriteCodesOfDH) {
  for (const int64_t n : {16, 80, 336, 576})
    for (const bool dH_over_H : {false, true})
      for (const bool H_in_codes : {false, true})
        check({.n = n,
               .activation = TILEMOE_SWIGLU,
               .float_scales = dH_over_H,
               .dH_over_H = dH_over_H,
               .H_in_codes = H_in_codes,
               .codes_of_dH = true});
  check({.dtype = TILEMOE_FLOAT16, .codes_of_dH = true});
}
TEST_F(Fp8Gradients, HaveManyTilesThatWriteCodesOfDH) {
  check({.counts = {300, 1, 0, 257, 129},
         .d = 400,
         .n = 336,
         .activation = TILEMOE_SWIGLU,
         .dH_over_H = true,
         .codes_of_dH = true});
}
// A lane keeps the scales of a warp's number of k blocks, also of the second part.
TEST_F(Fp8Gradients, HaveLongSums) {
  check({.counts = {3}, .d = 33 * kFp8Tile - 112, .n = 16});
  check({.counts = {3}, .d = 16, .n = 20 * kFp8Tile - 112});
}
TEST_F(Fp8Gradients, HaveOtherLayouts) {
  check({.dtype = TILEMOE_FLOAT16, .gathers = false, .float_scales = true});
  check({.counts = {0, 1}, .d = 16, .n = 16});
  check({.counts = {0, 0}});
}

// The planted defects of these kernels (simulator/defects.inc): wrong values in long sums, or a finding
// in tiles whose stages are used again.
TEST_F(Fp8Gradients, HaveTheirDefectsFound) {
  using enum simulator::FindingKind;
  constexpr std::optional<simulator::FindingKind> kWrongValues;
  const auto case_of = [](std::vector<int32_t> counts, int64_t d, int64_t n) {
    return Fp8GradientCase{.counts = std::move(counts),
                           .d = d,
                           .n = n,
                           .activation = TILEMOE_SWIGLU,
                           .codes_of_dH = true};
  };
  const Fp8GradientCase long_sums = case_of({3}, 33 * kFp8Tile - 112, 272);
  const Fp8GradientCase many_tiles = case_of({3, 5, 2, 4, 1}, 144, 336);
  const Fp8GradientProblem::Outputs right = expected(long_sums);
  const auto is_wrong = [&](int defect) {
    Fp8GradientProblem problem(long_sums, verify::cuda_memory());
    machine().plant(defect);
    const Fp8GradientProblem::Outputs got = problem.run();
    machine().plant(0);
    EXPECT_TRUE(machine().take_findings().empty());
    return differences(got.dH, right.dH) != 0 || differences(got.dX, right.dX) != 0 ||
           differences(got.dH_codes, right.dH_codes) != 0;
  };
  const auto finds = [&](int defect, simulator::FindingKind kind) {
    Fp8GradientProblem problem(many_tiles, verify::cuda_memory());
    machine().plant(defect);
    problem.run();
    machine().plant(0);
    return std::ranges::any_of(machine().take_findings(),
                               [&](const auto& finding) { return finding.kind == kind; });
  };
  EXPECT_FALSE(is_wrong(0) || finds(0, kOverwrittenInUse));
  int number = 0, found = 0;
  const auto check_defect = [&](const char* name, std::optional<simulator::FindingKind> kind) {
    ++found;
    EXPECT_TRUE(kind ? finds(number, *kind) : is_wrong(number)) << name;
  };
#define DEFECT(name, file, text, replacement, test_case, device, seed, kind) \
  ++number;                                                                  \
  if (std::string(test_case) == "fp8-gradients") check_defect(#name, kind);
#include "simulator/defects.inc"
#undef DEFECT
  EXPECT_EQ(found, 4);
}

}  // namespace
}  // namespace tilemoe::test
