// Quantisation to e4m3 on the CPU, bit for bit, and the arguments that it refuses.
#include "quantize_fp8_support.h"
#include "verify/registry.h"

namespace tilemoe::test {
namespace {

constexpr DType kDTypes[] = {DType::kFloat32, DType::kBFloat16, DType::kFloat16};

TEST(QuantizeFp8, HasTheCodesAndScalesOfItsBlocks) {
  verify::Memory& memory = verify::host_memory();
  for (const DType dtype : kDTypes)
    for (const bool float_scales : {false, true})
      for (const int32_t block_rows : {1, 128}) {
        // A reduced run has one kind of scales of each dtype.
        if (verify::reduced_run() && float_scales != (dtype == DType::kBFloat16)) continue;
        const auto with = [&](int64_t E, int64_t R, int64_t C, int64_t part_rows, bool padded) {
          return Fp8Case{E, R, C, block_rows, part_rows, float_scales, dtype, padded};
        };
        expect_fp8(memory, with(1, 1, 8, 0, false));
        expect_fp8(memory, with(2, 130, 264, 0, true));
        expect_fp8(memory, with(3, 280, 128, 140, false));
        expect_fp8(memory, with(1, 12, 1000, 4, true));
      }
}

TEST(QuantizeFp8, WritesBothLayouts) {
  for (const DType dtype : kDTypes)
    for (Fp8Case of : {Fp8Case{.E = 1, .R = 8, .C = 8}, Fp8Case{.E = 2, .R = 136, .C = 264},
                       Fp8Case{.E = 3, .R = 272, .C = 144, .part_rows = 136},
                       Fp8Case{.E = 1, .R = 256, .C = 128}}) {
      of.dtype = dtype, of.padded = true;
      expect_both_layouts(verify::host_memory(), of);
    }
}

TEST(QuantizeFp8, HasBlocksOfSpecialNumbers) {
  for (const DType dtype : kDTypes)
    for (const bool float_scales : {false, true})
      expect_special_fp8(verify::host_memory(), dtype, float_scales);
}

TEST(QuantizeFp8, StopsAtTheEndOfTheRows) {
  expect_rows_before_end(verify::host_memory(), cpu_backend());
}

// Every number of e4m3, and what lies half-way between two of them, at factor 1.
TEST(QuantizeFp8, RoundsHalvesToEven) {
  const std::vector<double> magnitudes = e4m3_magnitudes();
  std::vector<float> values;
  for (size_t code = 0; code + 1 < magnitudes.size(); ++code)
    for (const double sign : {1., -1.}) {
      values.push_back(static_cast<float>(sign * magnitudes[code]));
      values.push_back(static_cast<float>(sign * (magnitudes[code] + magnitudes[code + 1]) / 2));
      values.insert(values.end(), 126, 448.f);
    }
  const auto rows = static_cast<int64_t>(values.size() / 128);
  expect_fp8(verify::host_memory(), {.E = 1, .R = rows, .C = 128, .dtype = DType::kFloat32},
             values);
}

TEST(QuantizeFp8, AnOutlierChangesNoOtherBlock) {
  std::vector<float> values(size_t{4} * 256, 0.5f), other = values;
  other[5] = 1e30f;
  std::vector<uint8_t> codes[2];
  std::vector<float> scales[2];
  for (int which : {0, 1}) {
    codes[which].resize(values.size() + 16);
    scales[which].resize(8);
    auto* const aligned = reinterpret_cast<uint8_t*>(
        (reinterpret_cast<uintptr_t>(codes[which].data()) + 15) / 16 * 16);
    std::vector<float>& from = which == 0 ? values : other;
    quantize_fp8({.device = Device::kCpu,
                  .values = ConstTensor(from.data(), DType::kFloat32, {1, 4, 256}),
                  .codes = aligned,
                  .scales = scales[which].data()});
    codes[which].assign(aligned, aligned + values.size());
  }
  EXPECT_NE(scales[0][0], scales[1][0]);
  for (size_t i = 1; i < 8; ++i) EXPECT_EQ(scales[0][i], scales[1][i]);
  for (size_t i = 128; i < values.size(); ++i) EXPECT_EQ(codes[0][i], codes[1][i]);
}

TEST(QuantizeFp8, RefusesArguments) {
  alignas(16) static float values[4 * 64];
  alignas(16) static uint8_t codes[4 * 64];
  static float scales[16];
  const auto call = [&](auto change) {
    QuantizeFp8 given{.device = Device::kCpu,
                      .values = ConstTensor(values, DType::kFloat32, {1, 4, 64}),
                      .codes = codes,
                      .scales = scales};
    change(given);
    quantize_fp8(given);
  };
  call([](QuantizeFp8&) {});
  EXPECT_THROW(call([](QuantizeFp8& g) { g.block_rows = 64; }), Error);
  EXPECT_THROW(call([](QuantizeFp8& g) { g.part_rows = 3; }), Error);
  EXPECT_THROW(call([](QuantizeFp8& g) { g.codes = nullptr; }), Error);
  EXPECT_THROW(call([](QuantizeFp8& g) { g.codes = codes + 8; }), Error);
  EXPECT_THROW(call([](QuantizeFp8& g) { g.scales = values; }), Error);
  alignas(16) static uint8_t columns[4 * 64];
  static float column_scales[16];
  const auto transposed = [&](auto change) {
    static float eight[8 * 64];
    alignas(16) static uint8_t eight_codes[8 * 64], eight_columns[8 * 64];
    call([&](QuantizeFp8& g) {
      g.values = ConstTensor(eight, DType::kFloat32, {1, 8, 64}), g.codes = eight_codes;
      g.block_rows = 128, g.transposed_codes = eight_columns, g.transposed_scales = column_scales;
      change(g);
    });
  };
  transposed([](QuantizeFp8&) {});
  EXPECT_THROW(transposed([](QuantizeFp8& g) { g.block_rows = 1; }), Error);
  EXPECT_THROW(transposed([](QuantizeFp8& g) { ++g.transposed_codes; }), Error);
  EXPECT_THROW(transposed([](QuantizeFp8& g) { g.transposed_codes = g.codes; }), Error);
  EXPECT_THROW(transposed([](QuantizeFp8& g) { g.transposed_scales = nullptr; }), Error);
  EXPECT_THROW(transposed([](QuantizeFp8& g) { g.transposed_codes = nullptr; }), Error);
  EXPECT_THROW(transposed([](QuantizeFp8& g) {
                 g.values = ConstTensor(values, DType::kFloat32, {1, 4, 64});
                 g.codes = codes, g.transposed_codes = columns;
               }),
               Error);
  EXPECT_THROW(call([](QuantizeFp8& g) {
                 g.values = ConstTensor(values, DType::kFloat32, {1, 4, 60});
               }),
               Error);
}

}  // namespace
}  // namespace tilemoe::test
