// Dequantisation on a GPU, bit for bit: every code, scales that make results subnormal or NaN, and
// weights of many tiles.
#include "dequantize_support.h"

namespace tilemoe::verify {
namespace {

class CudaDequantize : public testing::TestWithParam<Format> {};

TEST_P(CudaDequantize, EveryCodeAndScale) {
  const bool is_fp8 = GetParam() == Format::kFp8;
  Random random(21, 1);
  QuantizedArrays arrays = random_arrays(GetParam(), 1, 256, is_fp8 ? 256 : 512, 1, random);
  for (size_t i = 0; i < arrays.codes.size(); ++i) arrays.codes[i] = static_cast<uint8_t>(i);
  for (size_t i = 0; i < arrays.byte_scales.size(); ++i)
    arrays.byte_scales[i] = static_cast<uint8_t>(i * 251);
  const float special[] = {1e-40f, 65504.0f, NAN, 0.7f, -3e-5f};
  for (size_t i = 0; i < arrays.float_scales.size(); ++i) arrays.float_scales[i] = special[i % 5];
  for (const DType dtype : {DType::kBFloat16, DType::kFloat16})
    expect_exact(arrays, dtype, cuda_memory());
}

TEST_P(CudaDequantize, ManyTiles) {
  Random random(22, 1);
  for (const auto& [E, R, C] :
       {std::tuple{5, 264, 1120}, std::tuple{70, 48, 96}, std::tuple{2, 1000, 2048}})
    expect_exact(random_arrays(GetParam(), E, R, C, 1, random), DType::kBFloat16, cuda_memory());
}

INSTANTIATE_TEST_SUITE_P(, CudaDequantize, testing::ValuesIn(kFormats), format_name);

}  // namespace
}  // namespace tilemoe::verify
