// The fp8 recipes on a simulated GPU: the bits of the CPU backend, which adds in the same order, and
// an error by the name of what is missing on other archs.
#include <string>

#include "fp8_layer_support.h"
#include "lora_problem.h"

namespace tilemoe::test {
namespace {

class Fp8Layer : public testing::TestWithParam<verify::Case> {};

TEST_P(Fp8Layer, HasTheBitsOfTheCpu) {
  simulate("sm90");
  expect_bits_of_the_cpu(GetParam());
  expect_clean_run();
}

INSTANTIATE_TEST_SUITE_P(, Fp8Layer, testing::ValuesIn(fp8_layer_cases()), name_of_case);

TEST(Fp8LayerOfAnotherArch, IsRefused) {
  simulate("sm80");
  const verify::Inputs inputs = verify::make_inputs(*verify::find_case("fp8-recipe/bfloat16"), 1);
  verify::Problem problem(inputs, verify::cuda_memory());
  try {
    problem.run(verify::Passes::kForward);
    ADD_FAILURE() << "no error";
  } catch (const Error& error) {
    EXPECT_EQ(error.status(), Status::kUnsupported);
    EXPECT_NE(std::string(error.what()).find("FP8 wgmma"), std::string::npos) << error.what();
  }
}

}  // namespace
}  // namespace tilemoe::test
