#include "number.h"

#include <algorithm>
#include <bit>
#include <cmath>
#include <limits>

namespace tilemoe::verify {
namespace {

struct Format {
  int digits;  // significant bits, including the hidden one
  int min_exponent, max_exponent;
};

Format format_of(DType dtype) {
  switch (dtype) {
    case DType::kFloat32: return {.digits = 24, .min_exponent = -126, .max_exponent = 127};
    case DType::kBFloat16: return {.digits = 8, .min_exponent = -126, .max_exponent = 127};
    case DType::kFloat16: return {.digits = 11, .min_exponent = -14, .max_exponent = 15};
    case DType::kInt32:
    case DType::kInt64: break;
  }
  throw Error(Status::kInvalidArgument, "verify: not a floating type");
}

constexpr int kSignBit = 15;

// The exponent and the fraction bits of a normal double.
constexpr int kBias = 1023, kFractionBits = 52;

// 2^exponent, which must be a normal double.
double power_of_two(int exponent) {
  return std::bit_cast<double>(static_cast<uint64_t>(exponent + kBias) << kFractionBits);
}

// ilogb(x) of a finite x, or `smallest` if that is larger; the exponent of no subnormal is larger.
int exponent_of(double x, int smallest) {
  const auto biased = static_cast<int>(std::bit_cast<uint64_t>(x) >> kFractionBits & 0x7ff);
  return std::max(biased - kBias, smallest);
}

}  // namespace

double round_to(DType dtype, double x) {
  if (x == 0 || !std::isfinite(x)) return x;
  const Format format = format_of(dtype);
  const int unit = exponent_of(x, format.min_exponent) - (format.digits - 1);  // 2^unit
  const double rounded = std::nearbyint(x * power_of_two(-unit)) * power_of_two(unit);
  const double largest =
      (2.0 - power_of_two(1 - format.digits)) * power_of_two(format.max_exponent);
  if (std::fabs(rounded) <= largest) return rounded;
  return std::copysign(std::numeric_limits<double>::infinity(), x);
}

uint16_t encode_16bit(DType dtype, double x) {
  const Format format = format_of(dtype);
  const int fraction_bits = format.digits - 1;
  const int sign = std::signbit(x) ? 1 << kSignBit : 0;
  const int infinity = (2 * format.max_exponent + 1) << fraction_bits;
  const double magnitude = std::fabs(round_to(dtype, x));
  if (std::isnan(magnitude))
    return static_cast<uint16_t>(sign | infinity | (1 << (fraction_bits - 1)));
  if (std::isinf(magnitude)) return static_cast<uint16_t>(sign | infinity);
  if (magnitude == 0) return static_cast<uint16_t>(sign);
  const int exponent = exponent_of(magnitude, format.min_exponent);
  const int significand = static_cast<int>(magnitude * power_of_two(fraction_bits - exponent));
  const int biased = exponent - format.min_exponent;  // the hidden bit adds the missing 1
  return static_cast<uint16_t>(sign | ((biased << fraction_bits) + significand));
}

double decode_16bit(DType dtype, uint16_t bits) {
  const Format format = format_of(dtype);
  const int fraction_bits = format.digits - 1;
  const int fraction = bits & ((1 << fraction_bits) - 1);
  const int biased = (bits & ((1 << kSignBit) - 1)) >> fraction_bits;
  double magnitude = 0;
  if (biased == 2 * format.max_exponent + 1) {
    magnitude = fraction ? std::numeric_limits<double>::quiet_NaN()
                         : std::numeric_limits<double>::infinity();
  } else if (biased == 0) {
    magnitude = fraction * power_of_two(format.min_exponent - fraction_bits);
  } else {
    magnitude = (fraction + (1 << fraction_bits)) *
                power_of_two(biased - 1 + format.min_exponent - fraction_bits);
  }
  return bits >> kSignBit ? -magnitude : magnitude;
}

double load(DType dtype, const void* array, int64_t index) {
  switch (dtype) {
    case DType::kFloat32: return static_cast<const float*>(array)[index];
    case DType::kInt32: return static_cast<const int32_t*>(array)[index];
    case DType::kInt64: return static_cast<double>(static_cast<const int64_t*>(array)[index]);
    case DType::kBFloat16:
    case DType::kFloat16: return decode_16bit(dtype, static_cast<const uint16_t*>(array)[index]);
  }
  throw Error(Status::kInvalidArgument, "verify: unknown dtype");
}

void store(DType dtype, void* array, int64_t index, double value) {
  switch (dtype) {
    case DType::kFloat32: static_cast<float*>(array)[index] = static_cast<float>(value); return;
    case DType::kInt32: static_cast<int32_t*>(array)[index] = static_cast<int32_t>(value); return;
    case DType::kInt64: static_cast<int64_t*>(array)[index] = static_cast<int64_t>(value); return;
    case DType::kBFloat16:
    case DType::kFloat16: static_cast<uint16_t*>(array)[index] = encode_16bit(dtype, value); return;
  }
  throw Error(Status::kInvalidArgument, "verify: unknown dtype");
}

}  // namespace tilemoe::verify
