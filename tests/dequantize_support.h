// Common code of the tests of dequantisation: a weight's arrays between guards in a device's
// memory, and values compared bit for bit with arithmetic of its own (verify/quantized.h).
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "verify/memory.h"
#include "verify/number.h"
#include "verify/quantized.h"

namespace tilemoe::verify {

inline constexpr Format kFormats[] = {Format::kFp8, Format::kMxfp4, Format::kNf4,
                                      Format::kNf4Double, Format::kNvfp4};

inline std::string format_name(const testing::TestParamInfo<Format>& param) {
  return tilemoe_format_name(static_cast<tilemoe_format>(param.param));
}

class PlacedArrays {
 public:
  PlacedArrays(const QuantizedArrays& arrays, Memory& memory)
      : memory_(memory),
        weight_(placed(arrays, false,
                       [&](const char* /*field*/, const auto& values) { return place(values); })) {}
  const Quantized& weight() const { return weight_; }

 private:
  template <class Element>
  const Element* place(const std::vector<Element>& values) {
    if (values.empty()) return nullptr;
    std::vector<std::byte> bytes(values.size() * sizeof(Element));
    std::memcpy(bytes.data(), values.data(), bytes.size());
    buffers_.push_back(std::make_unique<GuardedBuffer>(memory_, bytes.size()));
    buffers_.back()->write(bytes);
    return static_cast<const Element*>(buffers_.back()->data());
  }
  Memory& memory_;
  std::vector<std::unique_ptr<GuardedBuffer>> buffers_;
  Quantized weight_;
};

// The values of experts [first, first + rows.size()) of a weight, as `write` writes them to a
// tensor: those of an expert without rows must stay as they were.
template <class Write>
void expect_exact(const QuantizedArrays& arrays, DType dtype, int64_t first,
                  const std::vector<int32_t>& rows, Memory& memory, const Write& write) {
  const PlacedArrays placed(arrays, memory);
  const int64_t of_expert = arrays.R * arrays.C, experts = static_cast<int64_t>(rows.size());
  GuardedTensor out(memory, dtype, {experts, arrays.R, arrays.C});
  out.poison();
  const std::vector<std::byte> before = out.bits();
  write(placed.weight(), out.view());
  EXPECT_TRUE(out.gaps_intact());
  const std::vector<std::byte> after = out.bits();
  const std::vector<float> expected = values_of(arrays), got = out.read();
  const auto is_right = [&](int64_t i) {
    const auto at = static_cast<size_t>(i), bytes = size_of(dtype);
    if (rows[static_cast<size_t>(i / of_expert)] == 0)
      return std::memcmp(&after[at * bytes], &before[at * bytes], bytes) == 0;
    const double value =
        round_to(dtype, double{expected[static_cast<size_t>(first * of_expert + i)]});
    if (std::isnan(value)) return std::isnan(got[at]);
    return double{got[at]} == value && std::signbit(got[at]) == std::signbit(value);
  };
  for (int64_t i = 0; i < experts * of_expert; ++i) {
    if (is_right(i)) continue;
    ADD_FAILURE() << "value " << i << " is " << got[static_cast<size_t>(i)] << ", expected "
                  << (rows[static_cast<size_t>(i / of_expert)] == 0
                          ? "none"
                          : std::to_string(expected[static_cast<size_t>(first * of_expert + i)]));
    return;
  }
}

// The same of all experts, by tilemoe_dequantize.
inline void expect_exact(const QuantizedArrays& arrays, DType dtype, Memory& memory) {
  const std::vector<int32_t> rows(static_cast<size_t>(arrays.E), 1);
  expect_exact(arrays, dtype, 0, rows, memory, [&](const Quantized& weight, const Tensor& out) {
    dequantize(memory.device(), weight, out);
  });
}

}  // namespace tilemoe::verify
