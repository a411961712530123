#include "quantized.h"

#include <cmath>
#include <limits>
#include <stdexcept>

namespace tilemoe::verify {
namespace {

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();

int64_t blocks_of(int64_t count, int64_t size) {
  return (count + size - 1) / size;
}

bool has_bytes_of_codes(Format format) {
  return format == Format::kFp8;
}
bool is_nf4(Format format) {
  return format == Format::kNf4 || format == Format::kNf4Double;
}

// A number with this many bits of exponent and mantissa below the sign, as IEEE 754 reads them.
double small_float(int code, int exponent_bits, int mantissa_bits, int bias) {
  const int mantissa = code & ((1 << mantissa_bits) - 1);
  const int exponent = code >> mantissa_bits & ((1 << exponent_bits) - 1);
  const bool negative = (code >> (exponent_bits + mantissa_bits) & 1) != 0;
  const int leading = exponent > 0 ? 1 << mantissa_bits : 0;
  const double magnitude =
      std::ldexp(leading + mantissa, std::max(exponent, 1) - bias - mantissa_bits);
  return negative ? -magnitude : magnitude;
}

double e2m1(int code) {
  return small_float(code, 2, 1, 1);
}
double e4m3(int code) {
  return (code & 0x7f) == 0x7f ? kNan : small_float(code, 4, 3, 7);
}
double e8m0(int scale) {
  return scale == 0xff ? kNan : std::ldexp(1, scale - 127);
}
// The quantiles of the normal distribution that bitsandbytes has.
double nf4(int code) {
  constexpr double kNumbers[] = {-1.0,
                                 -0.6961928009986877,
                                 -0.5250730514526367,
                                 -0.39491748809814453,
                                 -0.28444138169288635,
                                 -0.18477343022823334,
                                 -0.09105003625154495,
                                 0.0,
                                 0.07958029955625534,
                                 0.16093020141124725,
                                 0.24611230194568634,
                                 0.33791524171829224,
                                 0.44070982933044434,
                                 0.5626170039176941,
                                 0.7229568362236023,
                                 1.0};
  return kNumbers[code];
}

// Both factors are float32 numbers, so that the product in double is exact, or nearly: it has 48
// bits.
float product(double a, double b) {
  return static_cast<float>(a * b);
}

int code_of(const QuantizedArrays& arrays, int64_t number) {
  if (has_bytes_of_codes(arrays.format)) return arrays.codes[static_cast<size_t>(number)];
  const int pair = arrays.codes[static_cast<size_t>(number / 2)];
  const bool high = is_nf4(arrays.format) == (number % 2 == 0);
  return high ? pair >> 4 : pair & 0xf;
}

void set_code(QuantizedArrays& arrays, int64_t number, int code) {
  if (has_bytes_of_codes(arrays.format)) {
    arrays.codes[static_cast<size_t>(number)] = static_cast<uint8_t>(code);
    return;
  }
  uint8_t& pair = arrays.codes[static_cast<size_t>(number / 2)];
  const bool high = is_nf4(arrays.format) == (number % 2 == 0);
  pair = static_cast<uint8_t>(high ? (pair & 0x0f) | code << 4 : (pair & 0xf0) | code);
}

double number_of(Format format, int code) {
  if (format == Format::kFp8) return e4m3(code);
  return is_nf4(format) ? nf4(code) : e2m1(code);
}

float scale_of(const QuantizedArrays& arrays, int64_t e, int64_t row, int64_t column) {
  const int64_t R = arrays.R, C = arrays.C, number = (e * R + row) * C + column;
  const auto byte = [&](int64_t index) {
    return arrays.byte_scales.at(static_cast<size_t>(index));
  };
  const auto floating = [](const std::vector<float>& scales, int64_t index) {
    return scales.at(static_cast<size_t>(index));
  };
  switch (arrays.format) {
    case Format::kFp8: {
      const int64_t down = blocks_of(R, 128), across = blocks_of(C, 128);
      return floating(arrays.float_scales, (e * down + row / 128) * across + column / 128);
    }
    case Format::kMxfp4: return static_cast<float>(e8m0(byte(number / 32)));
    case Format::kNf4: return floating(arrays.float_scales, number / 64);
    case Format::kNf4Double: {
      const int64_t block = number / 64;
      const float scale = product(floating(arrays.scale_map, byte(block)),
                                  floating(arrays.scale_of_scales, block / 256));
      return static_cast<float>(double{scale} + double{arrays.scale_offset.at(0)});
    }
    case Format::kNvfp4:
      return product(floating(arrays.scale_of_scales, e), e4m3(byte(number / 16)));
    case Format::kNone: break;
  }
  throw std::invalid_argument("a weight without a format");
}

}  // namespace

QuantizedArrays zero_arrays(Format format, int64_t E, int64_t R, int64_t C) {
  const int64_t count = E * R * C;
  QuantizedArrays arrays{.format = format, .E = E, .R = R, .C = C};
  const auto resize = [](auto& array, int64_t size) { array.resize(static_cast<size_t>(size)); };
  resize(arrays.codes, has_bytes_of_codes(format) ? count : count / 2);
  switch (format) {
    case Format::kFp8:
      resize(arrays.float_scales, E * blocks_of(R, 128) * blocks_of(C, 128));
      break;
    case Format::kMxfp4: resize(arrays.byte_scales, count / 32); break;
    case Format::kNf4: resize(arrays.float_scales, count / 64); break;
    case Format::kNf4Double:
      resize(arrays.byte_scales, count / 64);
      resize(arrays.scale_map, 256);
      resize(arrays.scale_of_scales, blocks_of(count / 64, 256));
      resize(arrays.scale_offset, 1);
      break;
    case Format::kNvfp4:
      resize(arrays.byte_scales, count / 16);
      resize(arrays.scale_of_scales, E);
      break;
    case Format::kNone: throw std::invalid_argument("a weight without a format");
  }
  return arrays;
}

QuantizedArrays random_arrays(Format format, int64_t E, int64_t R, int64_t C, double deviation,
                              Random& random) {
  QuantizedArrays arrays = zero_arrays(format, E, R, C);
  for (uint8_t& code : arrays.codes) {
    code = static_cast<uint8_t>(random.below(256));
    // Up to 14 of e4m3: larger numbers, as likely, would leave nothing to the others.
    if (format == Format::kFp8) code = static_cast<uint8_t>((code & 0x80) | (code & 0x7f) * 3 / 4);
  }
  // Of codes that are all as likely.
  const double of_codes = format == Format::kFp8 ? 4 : is_nf4(format) ? 0.5 : 3;
  const double scale = deviation / of_codes;
  const auto around = [&](double middle) {
    return static_cast<float>(middle * (0.5 + random.uniform()));
  };
  for (float& each : arrays.float_scales) each = around(scale);
  for (float& each : arrays.scale_map) each = static_cast<float>(2 * random.uniform() - 1);
  for (float& each : arrays.scale_of_scales)
    each = around(format == Format::kNvfp4 ? scale / 16 : scale / 2);
  for (float& each : arrays.scale_offset) each = static_cast<float>(scale);
  const int log_scale = static_cast<int>(std::floor(std::log2(scale)));
  for (uint8_t& each : arrays.byte_scales) switch (format) {
      case Format::kMxfp4:
        each = static_cast<uint8_t>(127 + log_scale + random.below(3) - 1);
        break;
      case Format::kNvfp4: each = static_cast<uint8_t>(0x50 + random.below(24)); break;
      default: each = static_cast<uint8_t>(random.below(256));
    }
  return arrays;
}

QuantizedArrays whole_arrays(Format format, int64_t E, int64_t R, int64_t C, int64_t sparsity,
                             Random& random) {
  QuantizedArrays arrays = zero_arrays(format, E, R, C);
  const auto code_for = [&](double value) {
    const int codes = has_bytes_of_codes(format) ? 256 : 16;
    for (int code = 0; code < codes; ++code)
      if (number_of(format, code) == value) return code;
    throw std::logic_error("no code of a whole number");
  };
  const int codes[] = {code_for(-1), code_for(0), code_for(1)};
  for (int64_t number = 0; number < E * R * C; ++number)
    set_code(arrays, number, codes[random.below(sparsity) == 0 ? random.below(3) : 1]);
  // Each scale is 1.
  for (auto* ones : {&arrays.float_scales, &arrays.scale_of_scales})
    for (float& each : *ones) each = 1;
  for (size_t i = 0; i < arrays.scale_map.size(); ++i) arrays.scale_map[i] = i == 5 ? 0.75f : 0;
  for (float& each : arrays.scale_offset) each = 0.25f;
  for (uint8_t& each : arrays.byte_scales)
    each = format == Format::kMxfp4 ? 127 : format == Format::kNvfp4 ? 0x38 : 5;
  return arrays;
}

std::vector<float> values_of(const QuantizedArrays& arrays) {
  std::vector<float> values;
  values.reserve(static_cast<size_t>(arrays.E * arrays.R * arrays.C));
  for (int64_t e = 0; e < arrays.E; ++e)
    for (int64_t row = 0; row < arrays.R; ++row)
      for (int64_t column = 0; column < arrays.C; ++column) {
        const int code = code_of(arrays, static_cast<int64_t>(values.size()));
        const double number = static_cast<float>(number_of(arrays.format, code));
        values.push_back(product(number, scale_of(arrays, e, row, column)));
      }
  return values;
}

namespace {

// (E, rows, columns) as (E, columns, rows)
template <class Element>
std::vector<Element> transposed_values(const std::vector<Element>& values, int64_t E, int64_t rows,
                                       int64_t columns) {
  std::vector<Element> made(values.size());
  for (int64_t e = 0; e < E; ++e)
    for (int64_t i = 0; i < rows; ++i)
      for (int64_t j = 0; j < columns; ++j)
        made[static_cast<size_t>((e * columns + j) * rows + i)] =
            values[static_cast<size_t>((e * rows + i) * columns + j)];
  return made;
}

}  // namespace

QuantizedArrays transposed(const QuantizedArrays& arrays) {
  QuantizedArrays made{.format = arrays.format, .E = arrays.E, .R = arrays.C, .C = arrays.R};
  made.codes = transposed_values(arrays.codes, arrays.E, arrays.R, arrays.C);
  made.float_scales = transposed_values(arrays.float_scales, arrays.E, (arrays.R + 127) / 128,
                                        (arrays.C + 127) / 128);
  return made;
}

}  // namespace tilemoe::verify
