// The fp8 recipe on a simulated GPU: H, O and dX with the bits of the CPU backend, which adds in the
// same order, and an error by the name of what is missing on other archs.
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "lora_problem.h"
#include "verify/problem.h"
#include "verify/registry.h"

namespace tilemoe::test {
namespace {

// The cases of the recipe in 16 bits. ReGLU has the same bits on every device.
std::vector<verify::Case> cases() {
  std::vector<verify::Case> cases;
  for (verify::Case one : verify::verification_cases()) {
    if (one.recipe != Recipe::kFp8 || one.dtype == DType::kFloat32) continue;
    one.activation = Activation::kReGLU, one.clamp = one.alpha = one.up_shift = 0;
    cases.push_back(one);
  }
  return cases;
}

class Fp8Layer : public testing::TestWithParam<verify::Case> {};

TEST_P(Fp8Layer, HasTheBitsOfTheCpu) {
  simulate("sm90");
  const verify::Inputs inputs = verify::make_inputs(GetParam(), 1);
  const auto run = [&](verify::Memory& memory) {
    verify::Problem problem(inputs, memory);
    problem.run();
    EXPECT_EQ(problem.damage(), std::vector<std::string>());
    return problem.computed();
  };
  const verify::Computed got = run(verify::cuda_memory());
  expect_clean_run();
  const verify::Computed expected = run(verify::host_memory());
  for (const verify::Output output : {verify::kH, verify::kO, verify::kDX})
    EXPECT_EQ(got[output], expected[output]) << verify::output_name(output);
}

INSTANTIATE_TEST_SUITE_P(, Fp8Layer, testing::ValuesIn(cases()),
                         [](const testing::TestParamInfo<verify::Case>& of) {
                           std::string name = of.param.name;
                           for (char& c : name)
                             if (c == '-' || c == '/') c = '_';
                           return name;
                         });

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
