#include "simulator/tensor_core.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <cstdlib>
#include <stdexcept>
#include <vector>

namespace tilemoe::simulator {
namespace {

constexpr int kLanes = 8;  // columns that are computed at once

constexpr int kSmallestExponent = -126;  // of float32 and bfloat16

int exponent_of(float number) {
  const auto biased = static_cast<int>(std::bit_cast<uint32_t>(number) >> 23 & 0xff);
  return std::max(biased, 1) - 127;
}

// The exponent of a normal number.
float power_of_two(int exponent) {
  return std::bit_cast<float>(static_cast<uint32_t>(exponent + 127) << 23);
}

// An operand's number as a float, which holds it exactly.
struct Number {
  float value;
  int16_t exponent;
};

Number decode_bfloat16(uint16_t bits) {
  const auto value = std::bit_cast<float>(static_cast<uint32_t>(bits) << 16);
  return {value, static_cast<int16_t>(exponent_of(value))};
}

Number decode_float16(uint16_t bits) {
  const uint32_t sign = static_cast<uint32_t>(bits & 0x8000) << 16;
  const uint32_t biased = bits >> 10 & 0x1f, fraction = bits & 0x3ff;
  if (biased == 0x1f)
    return {std::bit_cast<float>(sign | 0x7f800000 | fraction << 13), kSmallestExponent};
  if ((bits & 0x7fff) == 0) return {0.0f, kSmallestExponent};
  const uint32_t significand = biased == 0 ? fraction : fraction | 0x400;
  const int exponent = std::max(static_cast<int>(biased), 1) - 15;
  const float magnitude = static_cast<float>(significand) * power_of_two(exponent - 10);
  return {sign != 0 ? -magnitude : magnitude, static_cast<int16_t>(exponent)};
}

Number decode(OperandType type, uint16_t bits) {
  return type == OperandType::kBFloat16 ? decode_bfloat16(bits) : decode_float16(bits);
}

// A row of A.
struct Row {
  float value[kStepsOfSum];
  int16_t exponent[kStepsOfSum];
  bool finite, zero;
};

// The same number of rows of B next to each other.
struct Columns {
  float value[kStepsOfSum][kLanes];
  int16_t exponent[kStepsOfSum][kLanes];
  bool finite, zero;
};

Row decode_row(OperandType type, const uint16_t* bits) {
  Row row{.value = {}, .exponent = {}, .finite = true, .zero = true};
  for (int k = 0; k < kStepsOfSum; ++k) {
    const Number number = decode(type, bits[k]);
    row.value[k] = number.value;
    row.exponent[k] = number.exponent;
    row.finite = row.finite && std::isfinite(number.value);
    row.zero = row.zero && number.value == 0;
  }
  return row;
}

Columns decode_columns(OperandType type, const uint16_t* bits) {
  Columns columns{.value = {}, .exponent = {}, .finite = true, .zero = true};
  for (int lane = 0; lane < kLanes; ++lane)
    for (int k = 0; k < kStepsOfSum; ++k) {
      const Number number = decode(type, bits[lane * kStepsOfSum + k]);
      columns.value[k][lane] = number.value;
      columns.exponent[k][lane] = number.exponent;
      columns.finite = columns.finite && std::isfinite(number.value);
      columns.zero = columns.zero && number.value == 0;
    }
  return columns;
}

// `sum` 2^exponent as float32, cut off. |sum| < 2^53 and the exponent keep the product a normal
// double or zero.
float cut_to_float(int64_t sum, int exponent) {
  const double exact = std::ldexp(static_cast<double>(sum), exponent);
  const int top = exact == 0 ? 0 : std::max(std::ilogb(exact), kSmallestExponent);
  const double units = std::trunc(std::ldexp(exact, 23 - top));
  return static_cast<float>(std::ldexp(units, top - 23)) + 0.0f;  // no -0
}

constexpr uint32_t kNaN = 0x7fffffff;

// A group's sum for any numbers: the arithmetic's definition.
template <int kGroup>
float sum_of_group(int fraction_bits, const float* a, const int16_t* a_exponent, const float* b,
                   const int16_t* b_exponent, float c) {
  double ieee = c;  // right where it is no number; no sum of finite ones leaves a double's range
  int top = exponent_of(c);
  for (int k = 0; k < kGroup; ++k) {
    ieee += static_cast<double>(a[k]) * b[k * kLanes];
    top = std::max(top, a_exponent[k] + b_exponent[k * kLanes]);
  }
  if (std::isnan(ieee)) return std::bit_cast<float>(kNaN);
  if (std::isinf(ieee)) return static_cast<float>(ieee);
  const int unit = top - fraction_bits;  // the exponent of what is cut to
  const auto cut = [&](double addend) { return static_cast<int64_t>(std::ldexp(addend, -unit)); };
  int64_t sum = cut(c);
  for (int k = 0; k < kGroup; ++k) sum += cut(static_cast<double>(a[k]) * b[k * kLanes]);
  return cut_to_float(sum, unit);
}

// If the largest exponent lies between these, float32 represents all that is left of a product: one
// that is subnormal in it is below the unit, and none exceeds its range.
constexpr int kMinTop = -101, kMaxTop = 126;

// The same for several columns, in loops that compilers turn into vector instructions. `D` is the
// initial value of the sums and the result.
template <int kGroup>
void sum_groups(int fraction_bits, const Row& row, const Columns& columns, int first, float* D) {
  int16_t top[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) top[lane] = static_cast<int16_t>(exponent_of(D[lane]));
  for (int k = first; k < first + kGroup; ++k)
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto exponent = static_cast<int16_t>(row.exponent[k] + columns.exponent[k][lane]);
      top[lane] = top[lane] > exponent ? top[lane] : exponent;
    }
  int16_t min_top = top[0], max_top = top[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    min_top = min_top < top[lane] ? min_top : top[lane];
    max_top = max_top > top[lane] ? max_top : top[lane];
  }
  // An infinity or NaN in D has the exponent 128.
  if (min_top < kMinTop || max_top > kMaxTop || !row.finite || !columns.finite) {
    for (int lane = 0; lane < kLanes; ++lane)
      D[lane] = sum_of_group<kGroup>(fraction_bits, row.value + first, row.exponent + first,
                                     &columns.value[first][lane], &columns.exponent[first][lane],
                                     D[lane]);
    return;
  }

  float scale[kLanes];  // so that the unit becomes 1
  int32_t sum[2][kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    scale[lane] = std::bit_cast<float>((127 + fraction_bits - top[lane]) << 23);
    sum[0][lane] = static_cast<int32_t>(D[lane] * scale[lane]);
  }
  // Eight addends below 2^27 and one below 2^26 fit 32 bits; sixteen need not.
  static_assert(kGroup <= 16);
  for (int k = 0; k < kGroup; ++k)
    for (int lane = 0; lane < kLanes; ++lane)
      sum[k / 8][lane] +=
          static_cast<int32_t>(row.value[first + k] * columns.value[first + k][lane] * scale[lane]);
  for (int lane = 0; lane < kLanes; ++lane) {
    const double total = static_cast<double>(sum[0][lane]) + sum[1][lane];
    const double unit =
        std::bit_cast<double>(static_cast<uint64_t>(1023 + top[lane] - fraction_bits) << 52);
    // Only float32's 23 of its 52 fraction bits are left, so that the conversion is exact.
    constexpr uint64_t kKept = ~uint64_t{0} << 29;
    D[lane] =
        static_cast<float>(std::bit_cast<double>(std::bit_cast<uint64_t>(total * unit) & kKept));
  }
}

template <int kGroup>
void multiply_in_groups(int fraction_bits, const std::vector<Row>& rows, const Columns& columns,
                        int width, float* D) {
  for (const Row& row : rows) {
    // Rows and columns that fill up tiles.
    const bool zero = (row.zero || columns.zero) && row.finite && columns.finite &&
                      std::all_of(D, D + kLanes, [](float sum) { return sum == 0; });
    if (zero)
      std::fill_n(D, kLanes, 0.0f);  // no -0
    else
      for (int first = 0; first < kStepsOfSum; first += kGroup)
        sum_groups<kGroup>(fraction_bits, row, columns, first, D);
    D += width;
  }
}

}  // namespace

void multiply(const TensorCore& core, OperandType type, int rows, int columns, const uint16_t* A,
              const uint16_t* B, bool accumulate, float* D) {
  if (columns % kLanes != 0 || core.fraction_bits > 25 || (core.group != 8 && core.group != 16))
    throw std::invalid_argument("a tensor core has no MMA of this shape");
  if (!accumulate) std::fill_n(D, static_cast<size_t>(rows) * static_cast<size_t>(columns), 0.0f);
  std::vector<Row> of_A;
  of_A.reserve(static_cast<size_t>(rows));
  for (int row = 0; row < rows; ++row) of_A.push_back(decode_row(type, A + row * kStepsOfSum));
  for (int column = 0; column < columns; column += kLanes) {
    const Columns of_B = decode_columns(type, B + column * kStepsOfSum);
    if (core.group == 8)
      multiply_in_groups<8>(core.fraction_bits, of_A, of_B, columns, D + column);
    else
      multiply_in_groups<16>(core.fraction_bits, of_A, of_B, columns, D + column);
  }
}

namespace {

// significand 2^exponent, the significand with three fraction bits.
struct E4m3 {
  int32_t significand;
  int32_t exponent;
  bool is_nan;

  explicit E4m3(uint8_t code) {
    const int biased = code >> 3 & 0xf, fraction = code & 7;
    is_nan = biased == 15 && fraction == 7;
    exponent = std::max(biased, 1) - 7;
    significand = (biased == 0 ? 0 : 8) + fraction;
    if ((code & 0x80) != 0) significand = -significand;
  }
};

// x 2^shift, cut off towards zero.
int64_t shifted(int64_t x, int shift) {
  if (shift >= 0) return x << shift;
  return shift < -62 ? 0 : x < 0 ? -(-x >> -shift) : x >> -shift;
}

// A sum of e4m3 products has no infinity: 32 products of 448 * 448 are below 2^23.
float sum_of_e4m3(const E4m3* a, const E4m3* b, float c) {
  int top = exponent_of(c);
  for (int k = 0; k < kE4m3Steps; ++k) {
    if (a[k].is_nan || b[k].is_nan || std::isnan(c)) return std::bit_cast<float>(kNaN);
    top = std::max(top, a[k].exponent + b[k].exponent);
  }
  const int unit = top - kE4m3FractionBits;
  auto sum = static_cast<int64_t>(std::ldexp(static_cast<double>(c), -unit));
  for (int k = 0; k < kE4m3Steps; ++k)
    sum += shifted(int64_t{a[k].significand} * b[k].significand,
                   a[k].exponent + b[k].exponent - 6 - unit);
  if (sum == 0) return 0.0f;
  const int drop = static_cast<int>(std::bit_width(static_cast<uint64_t>(std::abs(sum)))) - 1 -
                   kE4m3FractionBits;
  if (drop > 0) sum = shifted(shifted(sum, -drop), drop);
  return static_cast<float>(std::ldexp(static_cast<double>(sum), unit));
}

}  // namespace

void multiply_e4m3(int rows, int columns, const uint8_t* A, const uint8_t* B, bool accumulate,
                   float* D) {
  const auto decoded = [](const uint8_t* codes, int count) {
    return std::vector<E4m3>(codes, codes + int64_t{count} * kE4m3Steps);
  };
  const std::vector<E4m3> a = decoded(A, rows), b = decoded(B, columns);
  for (int row = 0; row < rows; ++row)
    for (int column = 0; column < columns; ++column) {
      float& d =
          D[static_cast<size_t>(row) * static_cast<size_t>(columns) + static_cast<size_t>(column)];
      d = sum_of_e4m3(&a[static_cast<size_t>(row) * kE4m3Steps],
                      &b[static_cast<size_t>(column) * kE4m3Steps], accumulate ? d : 0.0f);
    }
}

}  // namespace tilemoe::simulator
