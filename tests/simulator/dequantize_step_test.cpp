// The kernel that dequantises weights, on a simulated GPU: each value exact, bit for bit, with guards
// around every array, and experts without rows as they were.
#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "cuda/kernels/kernels.h"
#include "lora_problem.h"
#include "verify/memory.h"
#include "verify/number.h"
#include "verify/quantized.h"

namespace tilemoe::test {
namespace {

using verify::QuantizedArrays;

constexpr Format kFormats[] = {Format::kFp8, Format::kMxfp4, Format::kNf4, Format::kNf4Double,
                               Format::kNvfp4};

// The arrays of a weight in the device's memory, each between guards.
class DeviceArrays {
 public:
  explicit DeviceArrays(const QuantizedArrays& arrays) {
    weight_.format = arrays.format;
    weight_.codes = place(arrays.codes);
    weight_.scales = place(arrays.float_scales);
    if (weight_.scales == nullptr) weight_.scales = place(arrays.byte_scales);
    weight_.scale_map = place(arrays.scale_map);
    weight_.scale_of_scales = place(arrays.scale_of_scales);
    weight_.scale_offset = place(arrays.scale_offset);
  }
  const Quantized& weight() const { return weight_; }

 private:
  template <class Element>
  const Element* place(const std::vector<Element>& values) {
    if (values.empty()) return nullptr;
    std::vector<std::byte> bytes(values.size() * sizeof(Element));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    buffers_.push_back(
        std::make_unique<verify::GuardedBuffer>(verify::cuda_memory(), bytes.size()));
    buffers_.back()->write(bytes);
    return static_cast<const Element*>(buffers_.back()->data());
  }
  std::vector<std::unique_ptr<verify::GuardedBuffer>> buffers_;
  Quantized weight_;
};

// Dequantises experts [first, first + rows.size()), and compares those with rows.
void expect_values(const QuantizedArrays& arrays, DType dtype, int64_t first,
                   const std::vector<int32_t>& rows) {
  const DeviceArrays device(arrays);
  const auto experts = static_cast<int64_t>(rows.size());
  const int64_t of_expert = arrays.R * arrays.C;
  PlacedTensor begins(TILEMOE_INT32, {experts}, {1}), ends(TILEMOE_INT32, {experts}, {1});
  begins.fill([](const Index& i) { return 10.0 * static_cast<double>(i[0]); });
  ends.fill([&](const Index& i) {
    return 10.0 * static_cast<double>(i[0]) + rows[static_cast<size_t>(i[0])];
  });
  verify::GuardedTensor out(verify::cuda_memory(), dtype, {experts, arrays.R, arrays.C});
  out.poison();
  const std::vector<std::byte> before = out.bits();
  cuda::dequantize({.weight = device.weight(),
                    .first = first,
                    .out = out.view(),
                    .begins = begins.data<int32_t>(),
                    .ends = ends.data<int32_t>()});
  expect_clean_run();
  EXPECT_TRUE(out.gaps_intact());
  const std::vector<float> expected = verify::values_of(arrays), got = out.read();
  const std::vector<std::byte> after = out.bits();
  const size_t bytes = size_of(dtype);
  int wrong = 0;
  for (int64_t i = 0; i < experts * of_expert && wrong < 5; ++i) {
    const auto at = static_cast<size_t>(i);
    if (rows[static_cast<size_t>(i / of_expert)] == 0) {
      wrong += std::memcmp(&after[at * bytes], &before[at * bytes], bytes) != 0;
      continue;
    }
    const float value = expected[static_cast<size_t>(first * of_expert + i)];
    const double rounded = verify::round_to(dtype, double{value});
    const bool same = std::isnan(rounded) ? std::isnan(got[at])
                                          : double{got[at]} == rounded &&
                                                std::signbit(got[at]) == std::signbit(rounded);
    if (same) continue;
    ++wrong;
    ADD_FAILURE() << "value " << i << " is " << got[at] << ", expected " << rounded;
  }
  EXPECT_EQ(wrong, 0);
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

std::string name_of(const testing::TestParamInfo<Format>& param) {
  return tilemoe_format_name(static_cast<tilemoe_format>(param.param));
}

INSTANTIATE_TEST_SUITE_P(, DequantizeStep, testing::ValuesIn(kFormats), name_of);

}  // namespace
}  // namespace tilemoe::test
