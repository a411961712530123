// The kernel that dequantises weights, on a simulated GPU: each value exact, bit for bit, with guards
// around every array, and experts without rows as they were.
#include "cuda/kernels/kernels.h"
#include "dequantize_support.h"
#include "lora_problem.h"

namespace tilemoe::test {
namespace {

using verify::QuantizedArrays;

void expect_values(const QuantizedArrays& arrays, DType dtype, int64_t first,
                   const std::vector<int32_t>& rows) {
  const auto experts = static_cast<int64_t>(rows.size());
  PlacedTensor begins(TILEMOE_INT32, {experts}, {1}), ends(TILEMOE_INT32, {experts}, {1});
  begins.fill([](const Index& i) { return 10.0 * static_cast<double>(i[0]); });
  ends.fill([&](const Index& i) {
    return 10.0 * static_cast<double>(i[0]) + rows[static_cast<size_t>(i[0])];
  });
  verify::expect_exact(arrays, dtype, first, rows, verify::cuda_memory(),
                       [&](const Quantized& weight, const Tensor& out) {
                         cuda::dequantize({.weight = weight,
                                           .first = first,
                                           .out = out,
                                           .begins = begins.data<int32_t>(),
                                           .ends = ends.data<int32_t>()});
                         expect_clean_run();
                       });
}

class DequantizeStep : public testing::TestWithParam<Format> {
 protected:
  void SetUp() override {
    simulator::Machine::instance().set_device(simulator::setting_of("sm90").device);
  }
};

// Rows and columns past a tile, blocks that two experts share, and more experts than a warp has lanes.
TEST_P(DequantizeStep, IsExact) {
  verify::Random random(11, 1);
  const auto arrays = [&](int64_t E, int64_t R, int64_t C) {
    return verify::random_arrays(GetParam(), E, R, C, 1, random);
  };
  expect_values(arrays(4, 132, 160), DType::kBFloat16, 1, {1, 0, 3});
  expect_values(arrays(3, 16, 1088), DType::kFloat16, 0, {1, 2, 7});
  expect_values(arrays(140, 2, 32), DType::kBFloat16, 0, std::vector<int32_t>(140, 1));
  // Tiles of FP8 with a few long rows, below the first scale.
  if (GetParam() == Format::kFp8) expect_values(arrays(1, 200, 1024), DType::kBFloat16, 0, {1});
}

// Every code by every scale byte, NaN and subnormal results among them.
TEST_P(DequantizeStep, TakesEveryCode) {
  verify::Random random(12, 1);
  const bool is_fp8 = GetParam() == Format::kFp8;
  QuantizedArrays arrays = verify::random_arrays(GetParam(), 1, 32, is_fp8 ? 256 : 512, 1, random);
  for (size_t i = 0; i < arrays.codes.size(); ++i) arrays.codes[i] = static_cast<uint8_t>(i);
  for (size_t i = 0; i < arrays.byte_scales.size(); ++i)
    arrays.byte_scales[i] = static_cast<uint8_t>(i * 251);
  const float special[] = {1e-40f, 65504.0f, NAN, 0.7f};
  for (size_t i = 0; i < arrays.float_scales.size(); ++i) arrays.float_scales[i] = special[i % 4];
  expect_values(arrays, DType::kBFloat16, 0, {1});
  expect_values(arrays, DType::kFloat16, 0, {1});
}

INSTANTIATE_TEST_SUITE_P(, DequantizeStep, testing::ValuesIn(verify::kFormats),
                         verify::format_name);

}  // namespace
}  // namespace tilemoe::test
