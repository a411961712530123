#include "fp8_H.h"

#include <array>
#include <cmath>
#include <cstring>
#include <limits>

#include "number.h"

namespace tilemoe::verify {
namespace {

constexpr size_t kBlock = 128, kGroup = 16;

double value_of(uint8_t code) {
  const int exponent = code >> 3 & 0xf, fraction = code & 7;
  if ((code & 0x7f) == 0x7f) return std::numeric_limits<double>::quiet_NaN();
  const double magnitude =
      exponent == 0 ? std::ldexp(fraction, -9) : std::ldexp(8 + fraction, exponent - 10);
  return code & 0x80 ? -magnitude : magnitude;
}

// Where tilemoe.h puts a column of gate (half 0) or up.
size_t place_of(size_t half, size_t column) {
  constexpr std::array<size_t, kGroup> kOrder = {0, 1, 8,  9,  2, 3, 10, 11,
                                                 4, 5, 12, 13, 6, 7, 14, 15};
  size_t at = 0;
  while (kOrder[at] != column % kGroup) ++at;
  return (2 * (column / kGroup) + half) * kGroup + at;
}

}  // namespace

CodesOfH::CodesOfH(const Case& test_case, int64_t capacity, Memory& memory)
    : given_(test_case.format_H == Format::kFp8),
      dtype_(test_case.dtype),
      rows_(given_ ? static_cast<size_t>(capacity) : 0),
      n_(static_cast<size_t>(test_case.n)),
      codes_(memory, rows_ * 2 * n_),
      scales_(memory, rows_ * 2 * ((n_ + kBlock - 1) / kBlock) * sizeof(float)) {}

Saved CodesOfH::saved() const {
  return {static_cast<uint8_t*>(codes_.data()), static_cast<float*>(scales_.data())};
}

void CodesOfH::poison() {
  codes_.poison(), scales_.poison();
}

std::vector<float> CodesOfH::read() const {
  const std::vector<std::byte> codes = codes_.read(), bytes = scales_.read();
  std::vector<float> scales(bytes.size() / sizeof(float)), H(rows_ * 2 * n_);
  if (!bytes.empty()) std::memcpy(scales.data(), bytes.data(), bytes.size());
  const size_t blocks = (n_ + kBlock - 1) / kBlock;
  for (size_t r = 0; r < rows_; ++r)
    for (size_t half = 0; half < 2; ++half)
      for (size_t j = 0; j < n_; ++j) {
        const auto code = static_cast<uint8_t>(codes[r * 2 * n_ + place_of(half, j)]);
        const float scale = scales[(r * blocks + j / kBlock) * 2 + half];
        const auto value = static_cast<float>(value_of(code) * static_cast<double>(scale));
        H[(r * 2 + half) * n_ + j] =
            static_cast<float>(round_to(dtype_, static_cast<double>(value)));
      }
  return H;
}

std::vector<std::string> CodesOfH::damage() const {
  if (codes_.guards_intact() && scales_.guards_intact()) return {};
  return {"bytes outside H_codes or H_scales were written"};
}

}  // namespace tilemoe::verify
