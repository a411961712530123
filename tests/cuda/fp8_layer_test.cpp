// The fp8 recipes on a GPU: the bits of the CPU backend, with and without adapters, also of many tiles.
#include "fp8_layer_support.h"

namespace tilemoe::test {
namespace {

class CudaFp8Layer : public testing::TestWithParam<verify::Case> {
 protected:
  void SetUp() override {
    if (!std::string_view(tilemoe_cuda_arch()).starts_with("sm90"))
      GTEST_SKIP() << "needs the arch sm90";
  }
};

// Tiles that are whole and ragged, ranks of one and of several k blocks.
std::vector<verify::Case> cases() {
  std::vector<verify::Case> cases = fp8_layer_cases();
  verify::Case large = *verify::find_case("fp8-forward-adapters-split/bfloat16");
  large.activation = Activation::kReGLU, large.clamp = large.alpha = large.up_shift = 0;
  large.T = 1500, large.d = 1040, large.n = 592, large.E = 12, large.K = 3;
  for (const int32_t rank : {8, 128}) {
    large.lora.gate = large.lora.up = large.lora.down = rank;
    large.name = "large-rank-" + std::to_string(rank);
    cases.push_back(large);
  }
  return cases;
}

TEST_P(CudaFp8Layer, HasTheBitsOfTheCpu) {
  expect_bits_of_the_cpu(GetParam());
}

INSTANTIATE_TEST_SUITE_P(, CudaFp8Layer, testing::ValuesIn(cases()), name_of_case);

}  // namespace
}  // namespace tilemoe::test
