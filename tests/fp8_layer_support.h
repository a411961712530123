// The passes that the fp8 recipes compute in e4m3 on a GPU, real or simulated, against the bits of the
// CPU backend, which adds in the same order.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <string>
#include <vector>

#include "thin_factors.h"
#include "verify/problem.h"
#include "verify/registry.h"

namespace tilemoe::test {

// The cases of the recipes in 16 bits. ReGLU has the same bits on every device.
inline std::vector<verify::Case> fp8_layer_cases() {
  std::vector<verify::Case> cases;
  for (verify::Case one : verify::verification_cases()) {
    if (one.recipe == Recipe::kBf16 || one.dtype == DType::kFloat32) continue;
    one.activation = Activation::kReGLU, one.clamp = one.alpha = one.up_shift = 0;
    cases.push_back(one);
  }
  return cases;
}

// "forward_adapters_split_bf16" of "fp8-forward-adapters-split/bfloat16": ctest's lines are short.
inline std::string name_of_case(const testing::TestParamInfo<verify::Case>& of) {
  std::string name = of.param.name.substr(0, of.param.name.find('/'));
  if (name.starts_with("fp8-")) name.erase(0, 4);
  std::replace(name.begin(), name.end(), '-', '_');
  return name + (of.param.dtype == DType::kBFloat16 ? "_bf16" : "_f16");
}

// Of H and O, with adapters whose GEMMs round nothing, and of dX unless backward dequantises.
inline void expect_bits_of_the_cpu(const verify::Case& one) {
  verify::Inputs inputs = verify::make_inputs(one, 1);
  thin_factors(inputs);
  const bool fp8_backward = one.recipe == Recipe::kFp8;
  const auto run = [&](verify::Memory& memory) {
    verify::Problem problem(inputs, memory);
    problem.run(fp8_backward ? verify::Passes::kAll : verify::Passes::kForward);
    EXPECT_EQ(problem.damage(), std::vector<std::string>());
    return problem.computed();
  };
  const verify::Computed got = run(verify::cuda_memory());
  const verify::Computed expected = run(verify::host_memory());
  for (const verify::Output output : {verify::kH, verify::kO, verify::kDX}) {
    if (output == verify::kDX && !fp8_backward) continue;
    EXPECT_TRUE(got[output] == expected[output]) << verify::output_name(output);
  }
}

}  // namespace tilemoe::test
