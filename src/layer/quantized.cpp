#include "layer/quantized.h"

#include <algorithm>

#include "core/check.h"
#include "core/formats.h"
#include "layer/arguments.h"
#include "layer/quantized_arrays.h"
#include "layer/workspace.h"

namespace tilemoe {

const char* format_name(tilemoe_format format) noexcept {
  switch (format) {
    case TILEMOE_FORMAT_NONE: return "none";
    case TILEMOE_FORMAT_FP8: return "fp8";
    case TILEMOE_FORMAT_MXFP4: return "mxfp4";
    case TILEMOE_FORMAT_NF4: return "nf4";
    case TILEMOE_FORMAT_NF4_DOUBLE: return "nf4_double";
    case TILEMOE_FORMAT_NVFP4: return "nvfp4";
  }
  return "unknown format";
}

namespace {

// (E, rows, columns) in the order of the codes.
Values values_of(bool is_transposed, int64_t E, int64_t rows, int64_t columns) {
  return is_transposed ? Values{E, columns, rows} : Values{E, rows, columns};
}

// Calls body(name, weight, its values, the format that the experts have) for the three weights.
template <class Body>
void for_each_weight(const tilemoe_quantized_weights& quantized, const tilemoe_experts& experts,
                     const Body& body) {
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const auto call = [&](const char* name, const tilemoe_quantized& weight, int64_t rows,
                        int64_t columns, tilemoe_format format) {
    body(name, weight, values_of(weight.transposed != 0, E, rows, columns), format);
  };
  call("quantized.W1", quantized.W1, w1_rows(experts), d, experts.format_1);
  call("quantized.W1_up", quantized.W1_up, n, d,
       split(experts) ? experts.format_1 : TILEMOE_FORMAT_NONE);
  call("quantized.W2", quantized.W2, d, n, experts.format_2);
}
// The same for the transposed weights. `given`: the call has them.
template <class Body>
void for_each_transposed(const tilemoe_quantized_weights& quantized, const tilemoe_experts& experts,
                         bool given, const Body& body) {
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const auto call = [&](const char* name, const tilemoe_quantized& weight, int64_t rows,
                        int64_t columns, bool exists) {
    body(name, weight, Values{E, columns, rows},
         given && exists ? TILEMOE_FORMAT_FP8 : TILEMOE_FORMAT_NONE);
  };
  call("quantized.W1_transposed", quantized.W1_transposed, w1_rows(experts), d, true);
  call("quantized.W1_up_transposed", quantized.W1_up_transposed, n, d, split(experts));
  call("quantized.W2_transposed", quantized.W2_transposed, d, n, true);
}

bool any_quantized(const tilemoe_experts& experts) {
  return experts.format_1 != TILEMOE_FORMAT_NONE || experts.format_2 != TILEMOE_FORMAT_NONE;
}

}  // namespace

// ---- the arguments of a call

tilemoe_quantized_weights read_quantized(const tilemoe_quantized_weights* given,
                                         const tilemoe_experts& experts, bool reads_transposed) {
  TILEMOE_CHECK(any_quantized(experts) == (given != nullptr),
                (given ? "quantized is given, but experts.format_1 is "
                       : "quantized is null, but experts.format_1 is ")
                    << format_name(experts.format_1) << " and format_2 is "
                    << format_name(experts.format_2));
  if (given == nullptr) return {};
  const tilemoe_quantized_weights quantized = read_struct("quantized", given);
  for_each_weight(quantized, experts,
                  [](const char* name, const tilemoe_quantized& weight, const Values& values,
                     tilemoe_format format) {
                    TILEMOE_CHECK(weight.format == format,
                                  name << ".format is " << format_name(weight.format)
                                       << ", expected " << format_name(format) << ", the experts'");
                    check_weight(name, weight, values);
                  });
  const bool has_transposed = quantized.W1_transposed.format != TILEMOE_FORMAT_NONE;
  const bool fp8_backward = is_fp8_backward(experts);
  TILEMOE_CHECK(!fp8_backward || !reads_transposed || has_transposed,
                "quantized.W1_transposed is absent, expected the transposed weights: the recipe is "
                "fp8, whose backward reads them (or use the recipe fp8_forward)");
  for_each_transposed(quantized, experts, has_transposed && fp8_backward,
                      [&](const char* name, const tilemoe_quantized& weight, const Values& values,
                          tilemoe_format format) {
                        TILEMOE_CHECK(weight.format == format,
                                      name << ".format is " << format_name(weight.format)
                                           << ", expected " << format_name(format)
                                           << (!fp8_backward    ? ": the recipe is not fp8"
                                               : has_transposed ? ""
                                                                : ": W1_transposed is absent"));
                        TILEMOE_CHECK(weight.transposed == (format == TILEMOE_FORMAT_NONE ? 0 : 1),
                                      name << ".transposed is " << weight.transposed
                                           << ", expected "
                                           << (format == TILEMOE_FORMAT_NONE ? 0 : 1));
                        check_weight(name, weight, values);
                      });
  TILEMOE_CHECK(!split(experts) || quantized.W1.transposed == quantized.W1_up.transposed,
                "quantized.W1.transposed is " << quantized.W1.transposed << " and W1_up's is "
                                              << quantized.W1_up.transposed
                                              << ", expected the same");
  if (is_fp8(experts))
    TILEMOE_CHECK_SUPPORTED(quantized.W1.transposed == 0 && quantized.W2.transposed == 0,
                            "recipe is " << recipe_name(experts)
                                         << ", which requires weights that are not transposed, but "
                                            "quantized.W1.transposed is "
                                         << quantized.W1.transposed << " and W2's is "
                                         << quantized.W2.transposed);
  return quantized;
}

void read_quantized_memory(MemoryUse& memory, const tilemoe_quantized_weights& quantized,
                           const tilemoe_experts& experts) {
  for_each_weight(quantized, experts,
                  [&](const char* name, const tilemoe_quantized& weight, const Values& values,
                      tilemoe_format) { read_arrays(memory, name, weight, values); });
  for_each_transposed(quantized, experts, true,
                      [&](const char* name, const tilemoe_quantized& weight, const Values& values,
                          tilemoe_format) { read_arrays(memory, name, weight, values); });
}

namespace {

tilemoe_tensor shape_of(const tilemoe_experts& experts, int64_t rows, int64_t columns,
                        bool is_transposed) {
  const Values stored = values_of(is_transposed, experts.E, rows, columns);
  const tilemoe_tensor shape{.data = nullptr,
                             .dtype = experts.dtype,
                             .ndim = 3,
                             .shape = {stored.E, stored.R, stored.C},
                             .stride = {stored.R * stored.C, stored.C, 1}};
  return is_transposed ? transposed(shape) : shape;
}

}  // namespace

tilemoe_weights with_dequantized(tilemoe_weights weights, const tilemoe_experts& experts,
                                 const tilemoe_quantized_weights& quantized) {
  if (experts.format_1 != TILEMOE_FORMAT_NONE) {
    const bool is_transposed = quantized.W1.transposed != 0;
    weights.W1 = shape_of(experts, w1_rows(experts), experts.d, is_transposed);
    if (split(experts)) weights.W1_up = shape_of(experts, experts.n, experts.d, is_transposed);
  }
  if (experts.format_2 != TILEMOE_FORMAT_NONE)
    weights.W2 = shape_of(experts, experts.d, experts.n, quantized.W2.transposed != 0);
  return weights;
}

tilemoe_weights with_shapes(tilemoe_weights weights, const tilemoe_experts& experts) {
  const tilemoe_weights shapes = with_dequantized({}, experts, {});
  if (!present(weights.W1)) weights.W1 = shapes.W1;
  if (!present(weights.W2)) weights.W2 = shapes.W2;
  return weights;
}

uint32_t quantized_gradients(const tilemoe_experts& experts) {
  uint32_t gradients = 0;
  if (is_fp8(experts)) return gradients;
  if (experts.format_1 != TILEMOE_FORMAT_NONE)
    gradients |= TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP;
  if (experts.format_2 != TILEMOE_FORMAT_NONE) gradients |= TILEMOE_GRADIENT_W2;
  return gradients;
}

void check_no_quantized_gradients(const tilemoe_experts& experts,
                                  const tilemoe_weights& gradients) {
  if (is_fp8(experts)) return;
  const char* const frozen = "a quantised weight has no gradient";
  if (experts.format_1 != TILEMOE_FORMAT_NONE) {
    check_absent("dweights.W1", gradients.W1, frozen);
    check_absent("dweights.W1_up", gradients.W1_up, frozen);
  }
  if (experts.format_2 != TILEMOE_FORMAT_NONE) check_absent("dweights.W2", gradients.W2, frozen);
}

// ---- the workspace

int64_t block_experts(const tilemoe_experts& experts, tilemoe_format format) {
  const int64_t blocks = std::max<int64_t>(experts.weight_blocks, 1);
  return format == TILEMOE_FORMAT_NONE ? experts.E : blocks_of(experts.E, blocks);
}

namespace {

size_t dequantized_bytes(const tilemoe_experts& experts, tilemoe_format format, int64_t rows,
                         int64_t columns) {
  if (format == TILEMOE_FORMAT_NONE) return 0;
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts.dtype));
  const int64_t matrix = checked_product(rows, columns, "a dequantised weight");
  return static_cast<size_t>(checked_product(
      block_experts(experts, format), checked_product(matrix, element, "a dequantised weight"),
      "the dequantised weights"));
}

}  // namespace

size_t dequantized_bytes_1(const tilemoe_experts& experts) {
  return dequantized_bytes(experts, experts.format_1, h_width(experts), experts.d);
}
size_t dequantized_bytes_2(const tilemoe_experts& experts) {
  return dequantized_bytes(experts, experts.format_2, experts.d, experts.n);
}

// ---- the steps

tilemoe_tensor WeightBlocks::dequantized(StepRow<Dequantize> Steps::*step,
                                         const tilemoe_quantized& weight,
                                         const tilemoe_tensor& shape, size_t place,
                                         const ExpertBlock& block, bool again) const {
  tilemoe_tensor values = slice(shape, 0, 0, block.rows.E);
  values.data = call_.workspace + place;
  if (again) return values;
  const Rows& rows = block.rows;
  call_.run(step, {.weight = weight,
                   .first = block.first,
                   .out = weight.transposed != 0 ? transposed(values) : values,
                   .begins = rows.offsets,
                   .ends = rows.ends != nullptr ? rows.ends : rows.offsets + 1,
                   .stream = call_.stream});
  return values;
}

UpWeights WeightBlocks::up_weights(StepRow<Dequantize> Steps::*step, size_t place,
                                   const ExpertBlock& block, bool again) const {
  const tilemoe_weights& weights = call_.weights;
  const tilemoe_quantized_weights& quantized = call_.quantized;
  UpWeights up{block.of(weights.W1), block.of(weights.W1_up), block.of(weights.b1),
               block.of(weights.b1_up)};
  if (format_1() == TILEMOE_FORMAT_NONE) return up;
  up.W1 = dequantized(step, quantized.W1, weights.W1, place, block, again);
  if (present(weights.W1_up))
    up.W1_up = dequantized(step, quantized.W1_up, weights.W1_up,
                           place + dequantized_bytes_1(call_.experts) / 2, block, again);
  return up;
}

tilemoe_tensor WeightBlocks::down_weight(StepRow<Dequantize> Steps::*step, size_t place,
                                         const ExpertBlock& block, bool again) const {
  if (format_2() == TILEMOE_FORMAT_NONE) return block.of(call_.weights.W2);
  return dequantized(step, call_.quantized.W2, call_.weights.W2, place, block, again);
}

// ---- a whole weight

void dequantize(const tilemoe_dequantize_args* given) {
  const tilemoe_dequantize_args args = read_struct("dequantize args", given);
  check_reserved("dequantize args", args.reserved);
  const Backend& backend = backend_for(args.device);
  const tilemoe_quantized& weight = args.weight;
  TILEMOE_CHECK(weight.format > TILEMOE_FORMAT_NONE && weight.format <= TILEMOE_FORMAT_NVFP4,
                "weight.format is " << static_cast<int>(weight.format)
                                    << ", expected a value in [1, "
                                    << static_cast<int>(TILEMOE_FORMAT_NVFP4) << "]");
  const tilemoe_tensor& out = args.out;
  TILEMOE_CHECK(out.ndim == 3, "out is " << describe(out) << ", expected (E, R, C)");
  const Values values{out.shape[0], out.shape[1], out.shape[2]};
  for (const auto& [name, size, limit] :
       {std::tuple("E", values.E, limits::kMaxExperts),
        std::tuple("R", values.R, limits::kMaxWidth), std::tuple("C", values.C, limits::kMaxWidth)})
    TILEMOE_CHECK(size >= 1 && size <= limit, "out is " << describe(out) << ": " << name << " is "
                                                        << size << ", expected a value in [1, "
                                                        << limit << "]");
  TILEMOE_CHECK(
      values.C % limits::kWidthMultiple == 0,
      "out is " << describe(out) << ", expected C to be a multiple of " << limits::kWidthMultiple);
  const bool takes_float32 = args.device == TILEMOE_CPU;
  TILEMOE_CHECK_SUPPORTED(takes_float32 || out.dtype != TILEMOE_FLOAT32,
                          "out is " << describe(out) << ", expected bfloat16 or float16 on CUDA");
  check_tensor("out", out,
               {{values.E, values.R, values.C},
                {TILEMOE_FLOAT32, TILEMOE_BFLOAT16, TILEMOE_FLOAT16},
                Strides::kContiguous});
  check_weight("weight", weight, values);
  MemoryUse memory;
  memory.writes("out", out);
  read_arrays(memory, "weight", weight, values);
  memory.check();
  backend.steps.dequantize_W1.run(
      {.weight = weight, .first = 0, .out = out, .stream = args.stream});
}

}  // namespace tilemoe
