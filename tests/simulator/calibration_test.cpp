// The registry's calibration cases distinguish the numbers of bits that a tensor core may keep.
#include <gtest/gtest.h>

#include "layer_support.h"
#include "simulator/tensor_core.h"
#include "verify/inputs.h"
#include "verify/number.h"
#include "verify/registry.h"

namespace tilemoe::simulator {
namespace {

using verify::Case;
using verify::Inputs;

std::vector<Case> calibration_cases() {
  std::vector<Case> cases;
  for (const Case& one : verify::verification_cases())
    if (one.name.starts_with("calibration-") && one.dtype != DType::kFloat32) cases.push_back(one);
  return cases;
}

class Calibration : public testing::TestWithParam<Case> {};

// The up-projection's GEMM, X with an expert's W1, in float32: (rows, columns).
std::vector<float> gemm(const Inputs& inputs, const TensorCore& core, int rows, int columns) {
  const Case& one = inputs.test_case;
  const auto d = static_cast<size_t>(one.d);
  const auto type = one.dtype == DType::kBFloat16 ? OperandType::kBFloat16 : OperandType::kFloat16;
  const auto slice = [&](const std::vector<float>& from, int count, size_t first_step) {
    std::vector<uint16_t> operand;
    for (int row = 0; row < count; ++row)
      for (size_t k = first_step; k < first_step + kStepsOfSum; ++k)
        operand.push_back(
            k < d ? verify::encode_16bit(one.dtype, from[static_cast<size_t>(row) * d + k])
                  : uint16_t{0});
    return operand;
  };
  std::vector<float> D(static_cast<size_t>(rows * columns));
  for (size_t step = 0; step < d; step += kStepsOfSum)
    multiply(core, type, rows, columns, slice(inputs.X, rows, step).data(),
             slice(inputs.weights.W1, columns, step).data(), step > 0, D.data());
  return D;
}

TEST_P(Calibration, ShowsKeptBits) {
  constexpr int kRows = 64, kColumns = 128;
  const Inputs inputs = verify::make_inputs(GetParam(), 1);
  const std::vector<float> right = gemm(inputs, kHopperCore, kRows, kColumns);
  for (const TensorCore& other : {TensorCore{.fraction_bits = 24, .group = 16},
                                  TensorCore{.fraction_bits = 25, .group = 8}, kAmpereCore}) {
    const std::vector<float> wrong = gemm(inputs, other, kRows, kColumns);
    int different = 0, stored_different = 0;
    for (size_t i = 0; i < right.size(); ++i) {
      different += right[i] != wrong[i];
      stored_different += verify::encode_16bit(GetParam().dtype, right[i]) !=
                          verify::encode_16bit(GetParam().dtype, wrong[i]);
    }
    const auto all = static_cast<int>(right.size());
    EXPECT_GT(different, all / 4) << other.fraction_bits << " " << other.group;
    if (GetParam().dtype == DType::kFloat16) {
      EXPECT_GT(stored_different, 0);
    }
  }
}

INSTANTIATE_TEST_SUITE_P(, Calibration, testing::ValuesIn(calibration_cases()), verify::test_name);

}  // namespace
}  // namespace tilemoe::simulator
