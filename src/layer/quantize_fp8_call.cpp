#include <algorithm>

#include "core/backend.h"
#include "core/check.h"
#include "core/fp8.h"
#include "core/overlap.h"
#include "layer/layer.h"

namespace tilemoe {
namespace {

using namespace limits;

// Checks the sizes and sets part_rows, if it is 0.
void check_sizes(tilemoe_quantize_fp8_args& args) {
  const tilemoe_tensor& values = args.values;
  TILEMOE_CHECK(args.block_rows == 1 || args.block_rows == kFp8Tile,
                "block_rows is " << args.block_rows << ", expected 1 or " << kFp8Tile);
  TILEMOE_CHECK(args.float_scales == 0 || args.float_scales == 1,
                "float_scales is " << args.float_scales << ", expected 0 or 1");
  check_reserved("quantize_fp8 args", args.reserved);
  TILEMOE_CHECK(values.ndim == 3, "values is " << describe(values) << ", expected (E, R, C)");
  const int64_t E = values.shape[0], R = values.shape[1], C = values.shape[2];
  const int64_t row_limit = max_rows(args.device);
  TILEMOE_CHECK(E >= 1 && E <= kMaxExperts, "values is " << describe(values) << ": E is " << E
                                                         << ", expected a value in [1, "
                                                         << kMaxExperts << "]");
  TILEMOE_CHECK(R >= 0 && R <= row_limit, "values is " << describe(values) << ": R is " << R
                                                       << ", expected a value in [0, " << row_limit
                                                       << "]");
  TILEMOE_CHECK(C >= kWidthMultiple && C % kWidthMultiple == 0 && C <= kMaxWidth,
                "values is " << describe(values) << ": C is " << C
                             << ", expected a positive multiple of " << kWidthMultiple
                             << ", at most " << kMaxWidth);
  if (args.part_rows == 0) args.part_rows = std::max<int64_t>(R, 1);
  TILEMOE_CHECK(args.part_rows >= 1 && R % args.part_rows == 0,
                "part_rows is " << args.part_rows << ", expected a divisor of R, " << R);
}

void check_transposed(const tilemoe_quantize_fp8_args& args) {
  TILEMOE_CHECK((args.transposed_codes != nullptr) == (args.transposed_scales != nullptr),
                (args.transposed_codes ? "transposed_codes is given without transposed_scales"
                                       : "transposed_scales is given without transposed_codes"));
  if (args.transposed_codes == nullptr) return;
  TILEMOE_CHECK(args.block_rows == kFp8Tile, "transposed_codes is given, but block_rows is "
                                                 << args.block_rows << ", expected " << kFp8Tile);
  const int64_t R = args.values.shape[1];
  TILEMOE_CHECK(R % kWidthMultiple == 0, "transposed_codes is given, but R is "
                                             << R << ", expected a multiple of " << kWidthMultiple);
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(args.transposed_codes) % 16 == 0,
                "transposed_codes is not aligned to 16 bytes");
}

}  // namespace

void quantize_fp8(const tilemoe_quantize_fp8_args* given) {
  tilemoe_quantize_fp8_args args = read_struct("quantize_fp8 args", given);
  check_sizes(args);
  const Backend& backend = backend_for(args.device);
  const tilemoe_tensor& values = args.values;
  const int64_t E = values.shape[0], R = values.shape[1], C = values.shape[2];
  check_tensor("values", values,
               {{E, R, C}, {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16}, Strides::kRows});
  if (R == 0) return;
  const int64_t scale_rows = R / args.part_rows * blocks_of(args.part_rows, args.block_rows);
  TILEMOE_CHECK(args.codes != nullptr && args.scales != nullptr,
                (args.codes == nullptr ? "codes" : "scales") << " is null");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(args.codes) % 16 == 0,
                "codes is not aligned to 16 bytes");
  check_transposed(args);
  const size_t codes = static_cast<size_t>(E * R * C);
  const size_t scales =
      static_cast<size_t>(E * scale_rows * blocks_of(C, kFp8Tile)) * sizeof(float);
  MemoryUse memory;
  memory.reads("values", values);
  memory.writes("codes", args.codes, codes);
  memory.writes("scales", args.scales, scales);
  if (args.transposed_codes != nullptr) {
    memory.writes("transposed_codes", args.transposed_codes, codes);
    memory.writes("transposed_scales", args.transposed_scales, scales);
  }
  memory.check();
  backend.quantize_fp8(args);
}

}  // namespace tilemoe
