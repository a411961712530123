// Dequantisation on the CPU, every code by special scales, bit for bit against arithmetic of its own
// (verify/quantized.h), and the experts that it leaves out.
#include <limits>

#include "cpu/cpu_backend.h"
#include "dequantize_support.h"

namespace tilemoe::verify {
namespace {

void expect_values(const QuantizedArrays& arrays) {
  for (const DType dtype : {DType::kFloat32, DType::kBFloat16, DType::kFloat16})
    expect_exact(arrays, dtype, host_memory());
}

// Scales of every kind: rounded products, those that become subnormal, infinite or NaN.
const std::vector<float> kScales = {1.0f,
                                    0.7f,
                                    -0.3f,
                                    0.0f,
                                    1.00390625f,
                                    3.1415927f,
                                    6.1e-5f,
                                    5.9604645e-8f,
                                    1.1754944e-38f,
                                    1.4e-45f,
                                    2.7e-40f,
                                    1e38f,
                                    3.4028235e38f,
                                    65504.0f,
                                    std::numeric_limits<float>::infinity(),
                                    std::numeric_limits<float>::quiet_NaN()};

// All bytes of codes, once per scale: a row of 256 codes of FP8, or of 512 of the others.
QuantizedArrays all_codes(Format format, int64_t rows) {
  QuantizedArrays arrays = zero_arrays(format, 1, rows, format == Format::kFp8 ? 256 : 512);
  for (size_t i = 0; i < arrays.codes.size(); ++i) arrays.codes[i] = static_cast<uint8_t>(i % 256);
  return arrays;
}

TEST(Dequantize, EveryCodeOfFp8) {
  for (const float scale : kScales) {
    QuantizedArrays arrays = all_codes(Format::kFp8, 1);
    for (float& each : arrays.float_scales) each = scale;
    expect_values(arrays);
  }
}

TEST(Dequantize, EveryCodeOfNf4) {
  for (const float scale : kScales) {
    QuantizedArrays arrays = all_codes(Format::kNf4, 1);
    for (float& each : arrays.float_scales) each = scale;
    expect_values(arrays);
  }
}

// Each row has one scale of all 256.
TEST(Dequantize, EveryCodeAndScaleOfMxfp4) {
  QuantizedArrays arrays = all_codes(Format::kMxfp4, 256);
  for (size_t i = 0; i < arrays.byte_scales.size(); ++i)
    arrays.byte_scales[i] = static_cast<uint8_t>(i / (512 / 32));
  expect_values(arrays);
}

TEST(Dequantize, EveryCodeAndScaleOfNvfp4) {
  for (const float global : kScales) {
    QuantizedArrays arrays = all_codes(Format::kNvfp4, 256);
    for (size_t i = 0; i < arrays.byte_scales.size(); ++i)
      arrays.byte_scales[i] = static_cast<uint8_t>(i / (512 / 16));
    arrays.scale_of_scales[0] = global;
    expect_values(arrays);
  }
}

// Rows of all codes with all 256 scales, in several blocks of 256 scales. The product and the sum are
// rounded apart: with one rounding for both, some of these values differ.
TEST(Dequantize, EveryCodeAndScaleOfNf4Double) {
  QuantizedArrays arrays = all_codes(Format::kNf4Double, 256);
  Random random(1, 2);
  for (size_t i = 0; i < arrays.byte_scales.size(); ++i)
    arrays.byte_scales[i] = static_cast<uint8_t>(i / (512 / 64));
  for (float& each : arrays.scale_map) each = static_cast<float>(2 * random.uniform() - 1);
  for (size_t i = 0; i < arrays.scale_of_scales.size(); ++i)
    arrays.scale_of_scales[i] = kScales[i % kScales.size()];
  arrays.scale_offset[0] = 0.0371f;
  expect_values(arrays);
}

// Rows and experts in which blocks begin and end anywhere: past one tile of FP8 either way, in blocks
// of NF4 that rows and experts share, and rows of one vector.
TEST(Dequantize, OddSizes) {
  struct Size {
    int64_t E, R, C;
  };
  for (const Format format : kFormats) {
    Random random(3, static_cast<uint64_t>(format));
    for (const Size& size : {Size{3, 130, 136}, Size{2, 5, 272}, Size{8, 3, 8}, Size{4, 2, 648},
                             Size{1, 1, 32}, Size{2, 129, 1088}}) {
      const int64_t block = format == Format::kMxfp4 ? 32 : format == Format::kNvfp4 ? 16 : 8;
      const int64_t C = (size.C + block - 1) / block * block;
      const bool is_nf4 = format == Format::kNf4 || format == Format::kNf4Double;
      if (is_nf4 && size.E * size.R * C % 64 != 0) continue;
      expect_values(random_arrays(format, size.E, size.R, C, 1, random));
    }
  }
}

// A block of experts: those without rows, and what lies next to them, stay as they were.
TEST(Dequantize, SkipsExpertsWithoutRows) {
  const std::vector<int32_t> rows = {3, 0, 6, 0, 1};
  const int32_t begins[] = {0, 3, 3, 9, 9}, ends[] = {3, 3, 9, 9, 10};
  for (const Format format : kFormats) {
    Random random(4, static_cast<uint64_t>(format));
    const QuantizedArrays arrays = random_arrays(format, 8, 66, 160, 1, random);
    constexpr int64_t kFirst = 2;
    expect_exact(
        arrays, DType::kBFloat16, kFirst, rows, host_memory(),
        [&](const Quantized& weight, const Tensor& out) {
          cpu::dequantize(
              {.weight = weight, .first = kFirst, .out = out, .begins = begins, .ends = ends});
        });
  }
}

TEST(Dequantize, NamesOfFormats) {
  EXPECT_STREQ(tilemoe_format_name(TILEMOE_FORMAT_NONE), "none");
  EXPECT_STREQ(tilemoe_format_name(TILEMOE_FORMAT_FP8), "fp8");
  EXPECT_STREQ(tilemoe_format_name(TILEMOE_FORMAT_MXFP4), "mxfp4");
  EXPECT_STREQ(tilemoe_format_name(TILEMOE_FORMAT_NF4), "nf4");
  EXPECT_STREQ(tilemoe_format_name(TILEMOE_FORMAT_NF4_DOUBLE), "nf4_double");
  EXPECT_STREQ(tilemoe_format_name(TILEMOE_FORMAT_NVFP4), "nvfp4");
  EXPECT_STREQ(tilemoe_format_name(static_cast<tilemoe_format>(6)), "unknown format");
}

}  // namespace
}  // namespace tilemoe::verify
