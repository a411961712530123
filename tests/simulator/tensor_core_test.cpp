// The tensor cores' arithmetic against the same rules on whole numbers of any length.
#include "simulator/tensor_core.h"

#include <gtest/gtest.h>

#include <bit>
#include <boost/multiprecision/cpp_int.hpp>
#include <cmath>
#include <limits>
#include <random>
#include <tuple>
#include <vector>

namespace tilemoe::simulator {

static const char* name_of(const TensorCore& core) {
  return core.group == 8 ? "Ampere" : "Hopper";
}
static const char* name_of(OperandType type) {
  return type == OperandType::kBFloat16 ? "BFloat16" : "Float16";
}
void PrintTo(const TensorCore& core, std::ostream* out) {
  *out << name_of(core);
}
void PrintTo(OperandType type, std::ostream* out) {
  *out << name_of(type);
}

namespace {

using Whole = boost::multiprecision::cpp_int;  // sign and magnitude: division cuts towards zero

// A format as IEEE 754 has it, or without infinity: with one NaN of each sign, all of whose bits
// are ones.
struct Format {
  int exponent_bits, fraction_bits;
  bool has_infinity = true;
};
constexpr Format kFloat16{5, 10}, kBFloat16{8, 7}, kFloat32{8, 23}, kE4m3{4, 3, false};

// significand 2^(exponent - format.fraction_bits)
struct Decoded {
  bool negative, nan, infinite;
  int exponent;
  uint32_t significand;
};

Decoded decode(Format format, uint32_t bits) {
  const uint32_t largest_fraction = (1u << format.fraction_bits) - 1;
  const uint32_t fraction = bits & largest_fraction;
  const uint32_t all_ones = (1u << format.exponent_bits) - 1;
  const uint32_t biased = bits >> format.fraction_bits & all_ones;
  const int bias = (1 << (format.exponent_bits - 1)) - 1;
  Decoded result{.negative = (bits >> (format.exponent_bits + format.fraction_bits) & 1) != 0,
                 .nan = biased == all_ones &&
                        (format.has_infinity ? fraction != 0 : fraction == largest_fraction),
                 .infinite = format.has_infinity && biased == all_ones && fraction == 0,
                 .exponent = static_cast<int>(biased == 0 ? 1 : biased) - bias,
                 .significand = biased == 0 ? fraction : fraction | 1u << format.fraction_bits};
  if (format.has_infinity && biased == 0 && fraction == 0) result.exponent = -126;
  return result;
}

// Numbers are counted in units of 2^-kPoint, of which all addends and results are multiples.
constexpr int kPoint = 600;

Whole power(int exponent) {
  return Whole(1) << (kPoint + exponent);
}

constexpr uint32_t kNaN = 0x7fffffff, kInfinity = 0x7f800000, kSign = 0x80000000;

// To `kept_bits` of the 23 fraction bits.
uint32_t cut_to_float32(const Whole& number, int kept_bits) {
  if (number == 0) return 0;
  const Whole magnitude = abs(number);
  const int top = std::max(static_cast<int>(msb(magnitude)) - kPoint, -126);
  const auto significand = static_cast<uint32_t>(magnitude / power(top - kept_bits))
                           << (23 - kept_bits);
  const uint32_t sign = number < 0 && significand != 0 ? kSign : 0;
  if (top > 127) return sign | kInfinity;
  // The hidden bit of a normal number adds one to the exponent's field.
  return sign | ((static_cast<uint32_t>(top + 126) << 23) + significand);
}

template <class Bits>
uint32_t expected_of_group(int fraction_bits, Format format, const std::vector<Bits>& a,
                           const std::vector<Bits>& b, uint32_t c, int kept_bits = 23) {
  struct Addend {
    Whole number;
    int exponent;
  };
  const Decoded before = decode(kFloat32, c);
  bool nan = before.nan, plus = before.infinite && !before.negative,
       minus = before.infinite && before.negative;
  std::vector<Addend> addends{{before.significand * power(before.exponent - 23), before.exponent}};
  if (before.negative) addends[0].number = -addends[0].number;
  for (size_t k = 0; k < a.size(); ++k) {
    const Decoded x = decode(format, a[k]), y = decode(format, b[k]);
    const bool negative = x.negative != y.negative;
    if (x.infinite || y.infinite) {
      const bool times_zero = (x.infinite ? y : x).significand == 0;
      nan = nan || times_zero;
      (negative ? minus : plus) = true;
    }
    nan = nan || x.nan || y.nan;
    const int exponent = x.exponent + y.exponent;
    Whole number =
        Whole(x.significand) * y.significand * power(exponent - 2 * format.fraction_bits);
    addends.push_back({negative ? Whole(-number) : number, exponent});
  }
  if (nan || (plus && minus)) return kNaN;
  if (plus || minus) return kInfinity | (minus ? kSign : 0);
  int top = addends[0].exponent;
  for (const Addend& addend : addends) top = std::max(top, addend.exponent);
  const Whole unit = power(top - fraction_bits);
  Whole sum = 0;
  for (const Addend& addend : addends) sum += addend.number / unit * unit;
  return cut_to_float32(sum, kept_bits);
}

uint32_t expected(const TensorCore& core, OperandType type, const uint16_t* a, const uint16_t* b,
                  uint32_t c) {
  const Format format = type == OperandType::kBFloat16 ? kBFloat16 : kFloat16;
  for (int k = 0; k < kStepsOfSum; k += core.group)
    c = expected_of_group<uint16_t>(core.fraction_bits, format, {a + k, a + k + core.group},
                                    {b + k, b + k + core.group}, c);
  return c;
}

using Parameters = std::tuple<TensorCore, OperandType>;

class TensorCoreTest : public testing::TestWithParam<Parameters> {
 protected:
  const TensorCore core = std::get<0>(GetParam());
  const OperandType type = std::get<1>(GetParam());
  std::mt19937 random{17};

  int uniform(int first, int last) {
    return std::uniform_int_distribution<int>(first, last)(random);
  }
  uint16_t any_bits() { return static_cast<uint16_t>(random()); }

  uint16_t encode(double number) const {
    const auto single = static_cast<float>(number);
    if (type == OperandType::kBFloat16)
      return static_cast<uint16_t>(std::bit_cast<uint32_t>(single) >> 16);
    if (number == 0) return std::signbit(number) ? 0x8000 : 0;
    const double magnitude = std::fabs(number);
    const int exponent = std::max(std::ilogb(magnitude), -14);
    const auto units = static_cast<uint32_t>(std::ldexp(magnitude, 10 - exponent));
    return static_cast<uint16_t>((number < 0 ? 0x8000 : 0) +
                                 (static_cast<uint32_t>(exponent + 14) << 10) + units);
  }

  // Compares one MMA of `rows` by `columns` by 16 with the reference.
  void compare(int rows, int columns, const std::vector<uint16_t>& A,
               const std::vector<uint16_t>& B, const std::vector<uint32_t>& C) {
    std::vector<float> D(C.size());
    for (size_t i = 0; i < C.size(); ++i) D[i] = std::bit_cast<float>(C[i]);
    multiply(core, type, rows, columns, A.data(), B.data(), true, D.data());
    for (int row = 0; row < rows; ++row)
      for (int column = 0; column < columns; ++column) {
        const auto at = static_cast<size_t>(row * columns + column);
        const uint16_t *a = &A[static_cast<size_t>(row * kStepsOfSum)],
                       *b = &B[static_cast<size_t>(column * kStepsOfSum)];
        ASSERT_EQ(std::bit_cast<uint32_t>(D[at]), expected(core, type, a, b, C[at]))
            << "row " << row << ", column " << column << ", before " << C[at];
      }
  }

  // `make_a` and so on give one number's bits.
  template <class A, class B, class C>
  void compare_random(int rows, int columns, A make_a, B make_b, C make_c) {
    std::vector<uint16_t> a(static_cast<size_t>(rows * kStepsOfSum)),
        b(static_cast<size_t>(columns * kStepsOfSum));
    std::vector<uint32_t> c(static_cast<size_t>(rows * columns));
    for (uint16_t& bits : a) bits = make_a();
    for (uint16_t& bits : b) bits = make_b();
    for (uint32_t& bits : c) bits = make_c();
    compare(rows, columns, a, b, c);
  }

  // One sum: the factors that are given, zeros after them.
  uint32_t sum(const std::vector<std::pair<double, double>>& factors, float before) {
    std::vector<uint16_t> a(kStepsOfSum), b(static_cast<size_t>(8 * kStepsOfSum));
    for (size_t k = 0; k < factors.size(); ++k)
      a[k] = encode(factors[k].first), b[k] = encode(factors[k].second);
    std::vector<float> D(8, before);
    multiply(core, type, 1, 8, a.data(), b.data(), true, D.data());
    const auto bits = std::bit_cast<uint32_t>(D[0]);
    EXPECT_EQ(bits, expected(core, type, a.data(), b.data(), std::bit_cast<uint32_t>(before)));
    return bits;
  }
};

TEST_P(TensorCoreTest, UnitScale) {
  std::normal_distribution<double> normal;
  const auto number = [&] { return encode(normal(random)); };
  for (int run = 0; run < 4; ++run)
    compare_random(64, 64, number, number, [&] {
      return std::bit_cast<uint32_t>(static_cast<float>(std::ldexp(normal(random), run * 4 - 4)));
    });
}

TEST_P(TensorCoreTest, ExponentsFarApart) {
  const int reach = type == OperandType::kBFloat16 ? 20 : 10;
  const auto number = [&] {
    return encode(std::ldexp(1 + uniform(0, 2047) / 2048.0, uniform(-reach, reach)) *
                  (uniform(0, 1) == 0 ? 1 : -1));
  };
  for (int run = 0; run < 4; ++run)
    compare_random(32, 64, number, number,
                   [&] { return (static_cast<uint32_t>(random()) & 0x8fffffff) | 0x38000000; });
}

// Among them subnormal numbers, zeros of either sign, infinities and NaN.
TEST_P(TensorCoreTest, AnyBits) {
  for (int run = 0; run < 4; ++run)
    compare_random(
        32, 64, [&] { return any_bits(); }, [&] { return any_bits(); },
        [&] { return static_cast<uint32_t>(random()); });
}

// The same without infinities and NaN, which leave hardly any sum finite.
TEST_P(TensorCoreTest, AnyFiniteBits) {
  const uint16_t top = type == OperandType::kBFloat16 ? 0x7f80 : 0x7c00;
  const auto number = [&] {
    for (;;)
      if (const uint16_t bits = any_bits(); (bits & top) != top) return bits;
  };
  const auto before = [&] {
    for (;;)
      if (const auto bits = static_cast<uint32_t>(random()); (bits & kInfinity) != kInfinity)
        return bits;
  };
  for (int run = 0; run < 4; ++run) compare_random(32, 64, number, number, before);
}

TEST_P(TensorCoreTest, TheEndsOfTheRange) {
  for (const int scale : {-75, -63, -56, -55, -54, -53, -52, -51, -50, 57, 60, 62, 63}) {
    const int one = type == OperandType::kBFloat16 ? scale : std::clamp(scale, -14, 14);
    const auto number = [&] {
      return encode(std::ldexp(1 + uniform(0, 2047) / 2048.0, one + uniform(-1, 1)) *
                    (uniform(0, 1) == 0 ? 1 : -1));
    };
    const auto before = [&] {
      const int exponent = std::clamp(2 * one + uniform(-4, 4), -126, 127) + 127;
      return (static_cast<uint32_t>(random()) & 0x807fffff) | static_cast<uint32_t>(exponent) << 23;
    };
    compare_random(32, 32, number, number, before);
  }
}

TEST_P(TensorCoreTest, LargestSignificandsOfOneSign) {
  const double largest = type == OperandType::kBFloat16 ? 255 / 128.0 : 2047 / 1024.0;
  const std::vector<std::pair<double, double>> factors(kStepsOfSum, {largest, largest});
  sum(factors, 1.9999999f);
  sum(factors, 0);
  const std::vector<std::pair<double, double>> negative(kStepsOfSum, {largest, -largest});
  sum(negative, -1.9999999f);
}

TEST_P(TensorCoreTest, KeepsBitsBelowTheLargestAddend) {
  const double last = std::ldexp(1, -core.fraction_bits);
  // The large ones cancel, so that what was kept of the small one is seen.
  EXPECT_EQ(std::bit_cast<float>(sum({{1, 1}, {last * 1024, 1 / 1024.0}}, -1)),
            static_cast<float>(last));
  EXPECT_EQ(sum({{1, 1}, {last * 512, 1 / 1024.0}}, -1), 0u);
  EXPECT_EQ(std::bit_cast<float>(sum({{1, 1}, {-last * 1536, 1 / 1024.0}}, -1)),
            static_cast<float>(-last));  // towards zero
  // The exponent of a product is that of its factors: these are 2.25, with exponent 0.
  EXPECT_EQ(std::bit_cast<float>(sum({{1.5, 1.5}, {-1.5, 1.5}, {last * 1024, 1 / 1024.0}}, 0)),
            static_cast<float>(last));
}

TEST_P(TensorCoreTest, SumsInGroups) {
  // In one group the small addend meets the large ones; in two groups it comes before them.
  std::vector<std::pair<double, double>> factors(kStepsOfSum, {0, 0});
  factors[0] = {std::ldexp(1, -14), std::ldexp(1, -14)};
  factors[8] = {1, 1};
  factors[15] = {1, -1};
  EXPECT_EQ(sum(factors, 0), 0u);
  std::swap(factors[0], factors[15]);
  std::swap(factors[8], factors[1]);
  const float left = std::bit_cast<float>(sum(factors, 0));
  EXPECT_EQ(left, core.group == 8 ? std::ldexp(1.0f, -28) : 0.0f);
}

TEST_P(TensorCoreTest, CutsTheSumTowardsZero) {
  const float above = std::nextafter(1.0f, 2.0f);
  EXPECT_EQ(std::bit_cast<float>(sum({{std::ldexp(1, -12), std::ldexp(1, -12)}}, above)), above);
  EXPECT_EQ(std::bit_cast<float>(sum({{-std::ldexp(1, -12), std::ldexp(1, -12)}}, -above)), -above);
}

TEST_P(TensorCoreTest, Zeros) {
  EXPECT_EQ(sum({}, 0.0f), 0u);
  EXPECT_EQ(sum({}, -0.0f), 0u);
  EXPECT_EQ(sum({{-0.0, 1}, {-0.0, 0.0}}, -0.0f), 0u);
  EXPECT_EQ(sum({{1, -1}}, 1), 0u);
  const float tiny = std::ldexp(1.0f, -120);
  EXPECT_EQ(std::bit_cast<float>(sum({}, tiny)), tiny);
  // A zero of bfloat16 has the exponent of its smallest numbers, one of float16 has one far below.
  const float small = std::ldexp(1.0f, -60);
  if (type == OperandType::kBFloat16)
    EXPECT_EQ(sum({{0, 0x1p100}}, small), 0u);
  else
    EXPECT_EQ(std::bit_cast<float>(sum({{0, 0x1p15}}, small)), small);
}

TEST_P(TensorCoreTest, SubnormalSums) {
  if (type == OperandType::kFloat16) return;      // no product of its numbers is that small
  EXPECT_EQ(sum({{0x1.8p-75, 0x1p-74}}, 0), 1u);  // of 1.5 units
  EXPECT_EQ(sum({{-0x1.8p-75, 0x1p-74}}, 0), kSign | 1u);
  EXPECT_EQ(sum({{-0x1p-75, 0x1p-75}}, 0), 0u);                        // of half a unit; not -0
  EXPECT_EQ(sum(std::vector(8, std::pair{0x1p-76, 0x1p-76}), 0), 0u);  // each below the last bit
  // Each is half a last bit of Ampere's, a whole one of Hopper's, and zero as a float.
  EXPECT_EQ(sum(std::vector(16, std::pair{0x1p-76, 0x1p-75}), 0),
            core.fraction_bits == 25 ? 4u : 0u);
}

TEST_P(TensorCoreTest, NoNumbers) {
  const float infinity = std::numeric_limits<float>::infinity(), nan = std::nanf("");
  std::vector<uint16_t> a(kStepsOfSum, encode(1)), b(static_cast<size_t>(8 * kStepsOfSum));
  const auto product = [&](uint16_t x, uint16_t y, float before) {
    std::vector<float> D(8, before);
    a[3] = x, b[3] = y;
    multiply(core, type, 1, 8, a.data(), b.data(), true, D.data());
    EXPECT_EQ(std::bit_cast<uint32_t>(D[0]),
              expected(core, type, a.data(), b.data(), std::bit_cast<uint32_t>(before)));
    return std::bit_cast<uint32_t>(D[0]);
  };
  const auto inf = static_cast<uint16_t>(type == OperandType::kBFloat16 ? 0x7f80 : 0x7c00);
  const auto some_nan = static_cast<uint16_t>(inf | 1), minus = static_cast<uint16_t>(inf | 0x8000);
  EXPECT_EQ(product(inf, encode(2), 1), kInfinity);
  EXPECT_EQ(product(minus, encode(2), 1), kInfinity | kSign);
  EXPECT_EQ(product(inf, encode(0), 1), kNaN);
  EXPECT_EQ(product(inf, encode(2), -infinity), kNaN);
  EXPECT_EQ(product(some_nan, encode(0), 1), kNaN);
  EXPECT_EQ(product(encode(0), some_nan, 1), kNaN);
  EXPECT_EQ(product(encode(0), encode(0), infinity), kInfinity);
  std::fill(a.begin(), a.end(), uint16_t{0});
  EXPECT_EQ(product(encode(0), inf, 0), kNaN);
  std::fill(a.begin(), a.end(), encode(1));
  EXPECT_EQ(product(encode(0), encode(0), nan), kNaN);
}

TEST_P(TensorCoreTest, PastFloat32) {
  const float largest = std::numeric_limits<float>::max();
  if (type == OperandType::kBFloat16) {
    EXPECT_EQ(sum({{0x1p100, 0x1p100}}, 0), kInfinity);
    EXPECT_EQ(sum({{0x1p100, 0x1p100}, {-0x1p100, 0x1p100}}, 5), 0u);
    EXPECT_EQ(sum({{-0x1p64, 0x1p63}, {-0x1p64, 0x1p63}}, 0), kInfinity | kSign);
  }
  EXPECT_EQ(std::bit_cast<float>(sum({{1, 1}}, largest)), largest);
}

TEST_P(TensorCoreTest, OverwritesUnlessItAccumulates) {
  const std::vector<uint16_t> A(16 * kStepsOfSum, encode(0.5)), B(24 * kStepsOfSum, encode(3));
  std::vector<float> D(16 * 24, std::nanf(""));
  multiply(core, type, 16, 24, A.data(), B.data(), false, D.data());
  for (const float number : D) ASSERT_EQ(number, 24);
}

std::string test_name(const testing::TestParamInfo<Parameters>& info) {
  const auto [core, type] = info.param;
  return std::string(name_of(core)) + name_of(type);
}
INSTANTIATE_TEST_SUITE_P(, TensorCoreTest,
                         testing::Combine(testing::Values(kAmpereCore, kHopperCore),
                                          testing::Values(OperandType::kBFloat16,
                                                          OperandType::kFloat16)),
                         test_name);

// ------------------------------------------------- e4m3

class E4m3 : public testing::Test {
 protected:
  using Codes = std::vector<uint8_t>;

  // Compares one MMA of `rows` by `columns` by 32 with the reference.
  void compare(const Codes& A, const Codes& B, const std::vector<uint32_t>& C) {
    const auto rows = A.size() / kE4m3Steps, columns = B.size() / kE4m3Steps;
    std::vector<float> D(C.size());
    for (size_t i = 0; i < C.size(); ++i) D[i] = std::bit_cast<float>(C[i]);
    multiply_e4m3(static_cast<int>(rows), static_cast<int>(columns), A.data(), B.data(), true,
                  D.data());
    for (size_t i = 0; i < C.size(); ++i) {
      const auto of = [&](const Codes& all, size_t line) {
        const auto first = all.begin() + static_cast<std::ptrdiff_t>(line * kE4m3Steps);
        return Codes(first, first + kE4m3Steps);
      };
      ASSERT_EQ(std::bit_cast<uint32_t>(D[i]),
                expected_of_group(13, kE4m3, of(A, i / columns), of(B, i % columns), C[i], 13))
          << "row " << i / columns << ", column " << i % columns << ", before " << C[i];
    }
  }

  // `bits` are left of each code, and none is NaN unless `has_nan`.
  Codes codes(int lines, unsigned bits, bool has_nan = false) {
    Codes all(static_cast<size_t>(lines * kE4m3Steps));
    for (uint8_t& code : all) {
      do {
        code = static_cast<uint8_t>(random_() & bits);
      } while (!has_nan && (code & 0x7f) == 0x7f);
    }
    return all;
  }
  std::vector<uint32_t> sums(int count, uint32_t first_exponent, uint32_t exponents) {
    std::vector<uint32_t> all(static_cast<size_t>(count));
    for (uint32_t& bits : all) {
      bits = static_cast<uint32_t>(random_()) & 0x807fffff;
      bits |= (first_exponent + static_cast<uint32_t>(random_()) % exponents) << 23;
    }
    return all;
  }

 private:
  std::mt19937 random_{23};
};

TEST_F(E4m3, AnyCodes) {
  for (int run = 0; run < 4; ++run) {
    compare(codes(16, 0xff), codes(32, 0xff), sums(16 * 32, 120, 20));
    compare(codes(16, 0xff), codes(32, 0xff), sums(16 * 32, 0, 255));
    compare(codes(16, 0xff, true), codes(32, 0xff, true), sums(16 * 32, 120, 20));
  }
}
TEST_F(E4m3, ExponentsFarApart) {
  for (int run = 0; run < 4; ++run)  // subnormal numbers, and up to 448
    compare(codes(16, 0x87), codes(32, 0xff), sums(16 * 32, 100, 30));
}
TEST_F(E4m3, LargestOfOneSign) {
  compare(Codes(kE4m3Steps, 0x7e), Codes(8 * kE4m3Steps, 0x7e), std::vector(8, 0x4b7fffffu));
  compare(Codes(kE4m3Steps, 0xfe), Codes(8 * kE4m3Steps, 0x7e), std::vector(8, 0xcb7fffffu));
}
TEST_F(E4m3, Zeros) {
  for (const uint32_t before : {0u, kSign, 0x00000001u, 0x32800000u, 0xb2ffffffu}) {
    compare(Codes(kE4m3Steps, 0), codes(8, 0xff), std::vector(8, before));
    compare(codes(3, 0xff), Codes(8 * kE4m3Steps, 0x80), std::vector(24, before));
  }
}
TEST_F(E4m3, NanIsOfItsRowOrColumn) {
  Codes A = codes(2, 0xff), B = codes(8, 0xff);
  A[3] = 0x7f, B[5 * kE4m3Steps] = 0xff;
  compare(A, B, sums(16, 120, 20));
  compare(codes(2, 0xff), codes(8, 0xff), std::vector(16, kNaN));
}

TEST(TensorCore, RefusesOtherShapes) {
  float D[12] = {};
  const uint16_t bits[12 * kStepsOfSum] = {};
  EXPECT_THROW(multiply(kHopperCore, OperandType::kFloat16, 1, 12, bits, bits, false, D),
               std::invalid_argument);
}

}  // namespace
}  // namespace tilemoe::simulator
