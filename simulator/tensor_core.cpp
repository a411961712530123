#include "simulator/tensor_core.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>
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

// A zero has the exponent of a subnormal number.
Number decode_e4m3(uint8_t code) {
  const int biased = code >> 3 & 0xf, fraction = code & 7;
  const int exponent = std::max(biased, 1) - 7;
  const float magnitude =
      biased == 15 && fraction == 7
          ? std::numeric_limits<float>::quiet_NaN()
          : static_cast<float>((biased == 0 ? 0 : 8) + fraction) * power_of_two(exponent - 3);
  return {(code & 0x80) != 0 ? -magnitude : magnitude, static_cast<int16_t>(exponent)};
}

// A row of A.
template <int kSteps>
struct Row {
  float value[kSteps];
  int16_t exponent[kSteps];
  bool finite, zero;
};

// The same number of rows of B next to each other.
template <int kSteps>
struct Columns {
  float value[kSteps][kLanes];
  int16_t exponent[kSteps][kLanes];
  bool finite, zero;
};

template <int kSteps, class Bits>
Row<kSteps> decode_row(Number (*decode)(Bits), const Bits* bits) {
  Row<kSteps> row{.value = {}, .exponent = {}, .finite = true, .zero = true};
  for (int k = 0; k < kSteps; ++k) {
    const Number number = decode(bits[k]);
    row.value[k] = number.value;
    row.exponent[k] = number.exponent;
    row.finite = row.finite && std::isfinite(number.value);
    row.zero = row.zero && number.value == 0;
  }
  return row;
}

template <int kSteps, class Bits>
Columns<kSteps> decode_columns(Number (*decode)(Bits), const Bits* bits) {
  Columns<kSteps> columns{.value = {}, .exponent = {}, .finite = true, .zero = true};
  for (int lane = 0; lane < kLanes; ++lane)
    for (int k = 0; k < kSteps; ++k) {
      const Number number = decode(bits[lane * kSteps + k]);
      columns.value[k][lane] = number.value;
      columns.exponent[k][lane] = number.exponent;
      columns.finite = columns.finite && std::isfinite(number.value);
      columns.zero = columns.zero && number.value == 0;
    }
  return columns;
}

// `sum` 2^exponent, cut off to `kept_bits` fraction bits. |sum| < 2^53 and the exponent keep the
// product a normal double or zero.
float cut_to_float(int64_t sum, int exponent, int kept_bits) {
  const double exact = std::ldexp(static_cast<double>(sum), exponent);
  const int top = exact == 0 ? 0 : std::max(std::ilogb(exact), kSmallestExponent);
  const double units = std::trunc(std::ldexp(exact, kept_bits - top));
  return static_cast<float>(std::ldexp(units, top - kept_bits)) + 0.0f;  // no -0
}

constexpr uint32_t kNaN = 0x7fffffff;

// A group's sum for any numbers: the arithmetic's definition.
template <int kGroup, int kKeptBits>
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
  return cut_to_float(sum, unit, kKeptBits);
}

// If the largest exponent lies between these, float32 represents all that is left of a product: one
// that is subnormal in it is below the unit, and none exceeds its range.
constexpr int kMinTop = -101, kMaxTop = 126;

// The same for several columns, in loops that compilers turn into vector instructions. `D` is the
// initial value of the sums and the result.
template <int kGroup, int kKeptBits, int kSteps>
void sum_groups(int fraction_bits, const Row<kSteps>& row, const Columns<kSteps>& columns,
                int first, float* D) {
  int16_t top[kLanes];
  for (int lane = 0; lane < kLanes; ++lane) top[lane] = static_cast<int16_t>(exponent_of(D[lane]));
  for (int k = first; k < first + kGroup; ++k)
    for (int lane = 0; lane < kLanes; ++lane) {
      const auto exponent = static_cast<int16_t>(row.exponent[k] + columns.exponent[k][lane]);
      top[lane] = top[lane] > exponent ? top[lane] : exponent;
    }
  // If all addends of a column are zero, any exponent gives zero.
  for (int lane = 0; lane < kLanes; ++lane) {
    if (top[lane] >= kMinTop || D[lane] != 0) continue;
    bool zero = true;
    for (int k = first; k < first + kGroup; ++k)
      zero = zero && (row.value[k] == 0 || columns.value[k][lane] == 0);
    if (zero) top[lane] = 0;
  }
  int16_t min_top = top[0], max_top = top[0];
  for (int lane = 1; lane < kLanes; ++lane) {
    min_top = min_top < top[lane] ? min_top : top[lane];
    max_top = max_top > top[lane] ? max_top : top[lane];
  }
  // An infinity or NaN in D has the exponent 128.
  if (min_top < kMinTop || max_top > kMaxTop || !row.finite || !columns.finite) {
    for (int lane = 0; lane < kLanes; ++lane)
      D[lane] = sum_of_group<kGroup, kKeptBits>(fraction_bits, row.value + first,
                                                row.exponent + first, &columns.value[first][lane],
                                                &columns.exponent[first][lane], D[lane]);
    return;
  }

  float scale[kLanes];  // so that the unit becomes 1
  int32_t sum[(kGroup + 7) / 8][kLanes] = {};
  for (int lane = 0; lane < kLanes; ++lane) {
    scale[lane] = std::bit_cast<float>((127 + fraction_bits - top[lane]) << 23);
    sum[0][lane] = static_cast<int32_t>(D[lane] * scale[lane]);
  }
  // Eight addends below 2^27 and one below 2^26 fit 32 bits; sixteen need not.
  for (int k = 0; k < kGroup; ++k)
    for (int lane = 0; lane < kLanes; ++lane)
      sum[k / 8][lane] +=
          static_cast<int32_t>(row.value[first + k] * columns.value[first + k][lane] * scale[lane]);
  for (int lane = 0; lane < kLanes; ++lane) {
    double total = 0;
    for (const auto& part : sum) total += part[lane];
    const double unit =
        std::bit_cast<double>(static_cast<uint64_t>(1023 + top[lane] - fraction_bits) << 52);
    // At most float32's 23 of its 52 fraction bits are left, so that the conversion is exact.
    constexpr uint64_t kKept = ~uint64_t{0} << (52 - kKeptBits);
    D[lane] =
        static_cast<float>(std::bit_cast<double>(std::bit_cast<uint64_t>(total * unit) & kKept));
  }
}

template <int kGroup, int kKeptBits, int kSteps>
void multiply_in_groups(int fraction_bits, const std::vector<Row<kSteps>>& rows,
                        const Columns<kSteps>& columns, int width, float* D) {
  for (const Row<kSteps>& row : rows) {
    // Rows and columns that fill up tiles.
    const bool zero = (row.zero || columns.zero) && row.finite && columns.finite &&
                      std::all_of(D, D + kLanes, [](float sum) { return sum == 0; });
    if (zero)
      std::fill_n(D, kLanes, 0.0f);  // no -0
    else
      for (int first = 0; first < kSteps; first += kGroup)
        sum_groups<kGroup, kKeptBits>(fraction_bits, row, columns, first, D);
    D += width;
  }
}

template <int kGroup, int kKeptBits, int kSteps, class Bits>
void multiply(int fraction_bits, Number (*decode)(Bits), int rows, int columns, const Bits* A,
              const Bits* B, bool accumulate, float* D) {
  if (columns % kLanes != 0) throw std::invalid_argument("an MMA has a multiple of 8 columns");
  if (!accumulate) std::fill_n(D, static_cast<size_t>(rows) * static_cast<size_t>(columns), 0.0f);
  std::vector<Row<kSteps>> of_A;
  of_A.reserve(static_cast<size_t>(rows));
  for (int row = 0; row < rows; ++row) of_A.push_back(decode_row<kSteps>(decode, A + row * kSteps));
  for (int column = 0; column < columns; column += kLanes)
    multiply_in_groups<kGroup, kKeptBits>(fraction_bits, of_A,
                                          decode_columns<kSteps>(decode, B + column * kSteps),
                                          columns, D + column);
}

}  // namespace

void multiply(const TensorCore& core, OperandType type, int rows, int columns, const uint16_t* A,
              const uint16_t* B, bool accumulate, float* D) {
  constexpr int kKeptBits = 23;
  const auto decode = type == OperandType::kBFloat16 ? decode_bfloat16 : decode_float16;
  if (core.fraction_bits > 25 || (core.group != 8 && core.group != 16))
    throw std::invalid_argument("a tensor core has no MMA of this shape");
  if (core.group == 8)
    multiply<8, kKeptBits, kStepsOfSum>(core.fraction_bits, decode, rows, columns, A, B, accumulate,
                                        D);
  else
    multiply<16, kKeptBits, kStepsOfSum>(core.fraction_bits, decode, rows, columns, A, B,
                                         accumulate, D);
}

void multiply_e4m3(int rows, int columns, const uint8_t* A, const uint8_t* B, bool accumulate,
                   float* D) {
  multiply<kE4m3Steps, kE4m3FractionBits, kE4m3Steps>(kE4m3FractionBits, decode_e4m3, rows, columns,
                                                      A, B, accumulate, D);
}

}  // namespace tilemoe::simulator
