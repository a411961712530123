#include "layer/quantized_arrays.h"

#include <cstddef>

#include "core/check.h"
#include "core/formats.h"
#include "layer/quantized.h"

namespace tilemoe {
namespace {

// An array of a quantised weight; without bytes: the format has none.
struct Array {
  const char* field;
  const void* data;
  int64_t bytes;
  size_t alignment;
};
constexpr int kArrays = 5;
struct Arrays {
  Array of[kArrays];
};

// Any sizes that read_experts() takes, or whose values check_values() has counted.
Arrays arrays_of(const tilemoe_quantized& weight, const Values& values) {
  constexpr int64_t kFloat = sizeof(float);
  const int64_t count = values.E * values.R * values.C;
  int64_t codes = count / 2, scales = 0, map = 0, of_scales = 0, offset = 0;
  size_t scale_alignment = 1;
  switch (weight.format) {
    case TILEMOE_FORMAT_NONE: codes = 0; break;
    case TILEMOE_FORMAT_FP8:
      codes = count;
      scales = values.E * blocks_of(values.R, kFp8Tile) * blocks_of(values.C, kFp8Tile) * kFloat;
      scale_alignment = kFloat;
      break;
    case TILEMOE_FORMAT_MXFP4: scales = count / kMxfp4Block; break;
    case TILEMOE_FORMAT_NF4:
      scales = count / kNf4Block * kFloat;
      scale_alignment = kFloat;
      break;
    case TILEMOE_FORMAT_NF4_DOUBLE:
      scales = count / kNf4Block;
      map = 256 * kFloat;
      of_scales = blocks_of(scales, kNf4NestedBlock) * kFloat;
      offset = kFloat;
      break;
    case TILEMOE_FORMAT_NVFP4:
      scales = count / kNvfp4Block;
      of_scales = values.E * kFloat;
      break;
  }
  return {{{"codes", weight.codes, codes, limits::kAlignment},
           {"scales", weight.scales, scales, scale_alignment},
           {"scale_map", weight.scale_map, map, kFloat},
           {"scale_of_scales", weight.scale_of_scales, of_scales, kFloat},
           {"scale_offset", weight.scale_offset, offset, kFloat}}};
}

// Whether a format can hold these values.
void check_values(const char* name, tilemoe_format format, const Values& values) {
  const auto check = [&](const char* what, int64_t count, int64_t block) {
    TILEMOE_CHECK(count % block == 0, name << " is " << format_name(format) << " of (" << values.E
                                           << ", " << values.R << ", " << values.C
                                           << ") values: expected " << what
                                           << " to be a multiple of " << block);
  };
  switch (format) {
    case TILEMOE_FORMAT_MXFP4: return check("a row", values.C, kMxfp4Block);
    case TILEMOE_FORMAT_NVFP4: return check("a row", values.C, kNvfp4Block);
    case TILEMOE_FORMAT_NF4:
    case TILEMOE_FORMAT_NF4_DOUBLE:
      return check("their number", values.E * values.R * values.C, kNf4Block);
    default: return;
  }
}

}  // namespace

void check_weight(const char* name, const tilemoe_quantized& weight, const Values& values) {
  const bool given = weight.format != TILEMOE_FORMAT_NONE;
  TILEMOE_CHECK(weight.transposed == 0 || (given && weight.transposed == 1),
                name << ".transposed is " << weight.transposed << ", expected "
                     << (given ? "0 or 1" : "0: the format is none"));
  check_values(name, weight.format, values);
  for (const Array& array : arrays_of(weight, values).of) {
    TILEMOE_CHECK((array.data != nullptr) == (array.bytes > 0),
                  name << "." << array.field << " is " << array.data << ", expected "
                       << (array.bytes > 0 ? "an array" : "null") << ": the format is "
                       << format_name(weight.format));
    TILEMOE_CHECK(reinterpret_cast<uintptr_t>(array.data) % array.alignment == 0,
                  name << "." << array.field << " " << array.data << " is not aligned to "
                       << array.alignment << " bytes");
  }
}

void read_arrays(MemoryUse& memory, const char* name, const tilemoe_quantized& weight,
                 const Values& values) {
  for (const Array& array : arrays_of(weight, values).of)
    memory.reads(name, array.data, static_cast<size_t>(array.bytes));
}

}  // namespace tilemoe
