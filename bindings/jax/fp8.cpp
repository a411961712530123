// FP8 weights and H in FP8: the arrays of a call as the C interface takes them, and the target that
// quantises a weight.
#include "view.h"

namespace tilemoe_jax {
namespace {

using xla::ffi::DataType;

constexpr int64_t kTile = 128;  // rows and columns of a block of TILEMOE_FORMAT_FP8

int64_t tiles(int64_t size) {
  return (size + kTile - 1) / kTile;
}

// The C interface has no shapes of codes and scales. Errors name codes as their weight.
void* array_of(const Call& call, const std::string& name, const std::string& suffix, DataType dtype,
               const std::vector<int64_t>& dims) {
  const Array* const array = call.find(name + suffix);
  if (array == nullptr || array->dtype != dtype)
    refuse(name + suffix + " is absent or has another dtype");
  if (array->dims != dims)
    refuse(name + " has shape " + describe(array->dims) + ", expected " + describe(dims));
  return array->data;
}

// (E, R, C) values of the operands <name>_codes and <name>_scales; without them, none.
tilemoe_quantized values_of(const Call& call, const std::string& name, int64_t E, int64_t R,
                            int64_t C, bool transposed) {
  tilemoe_quantized values{};
  if (!call.has(name + "_codes")) return values;
  values.format = TILEMOE_FORMAT_FP8;
  values.transposed = transposed ? 1 : 0;
  values.codes = array_of(call, name, "_codes", DataType::F8E4M3FN, {E, R, C});
  values.scales = array_of(call, name, "_scales", DataType::F32, {E, tiles(R), tiles(C)});
  return values;
}

}  // namespace

bool has_codes(const Call& call) {
  return call.has("W1_codes") || call.has("W2_codes");
}

void set_formats(const Call& call, tilemoe_experts& experts) {
  if (!has_codes(call)) return;
  if (call.has("W1_codes")) experts.format_1 = TILEMOE_FORMAT_FP8;
  if (call.has("W2_codes")) experts.format_2 = TILEMOE_FORMAT_FP8;
  experts.recipe = call.kind<tilemoe_recipe>("recipe");
  experts.format_H = call.kind<tilemoe_format>("save_h");
}

std::vector<int64_t> dims_of_H_scales(const tilemoe_experts& experts, int64_t capacity) {
  return {capacity, tiles(experts.n), 2};
}

void save_codes_of_H(const Call& call, const tilemoe_experts& experts, int64_t capacity,
                     tilemoe_saved& saved) {
  const auto codes = array_of(call, "H", "_codes", DataType::U8, {capacity, 2 * experts.n});
  const auto scales =
      array_of(call, "H", "_scales", DataType::F32, dims_of_H_scales(experts, capacity));
  saved.H_codes = static_cast<uint8_t*>(codes), saved.H_scales = static_cast<float*>(scales);
}

tilemoe_quantized_weights quantized_of(const Call& call, const tilemoe_experts& experts) {
  auto all = sized<tilemoe_quantized_weights>();
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const bool both_in_W1 = experts.gate_layout != TILEMOE_GATE_SPLIT &&
                          tilemoe_activation_gated(experts.activation) != 0;
  const int64_t rows = both_in_W1 ? 2 * n : n;
  all.W1 = values_of(call, "W1", E, rows, d, false);
  all.W1_up = values_of(call, "W1_up", E, n, d, false);
  all.W2 = values_of(call, "W2", E, d, n, false);
  all.W1_transposed = values_of(call, "W1_transposed", E, d, rows, true);
  all.W1_up_transposed = values_of(call, "W1_up_transposed", E, d, n, true);
  all.W2_transposed = values_of(call, "W2_transposed", E, n, d, true);
  return all;
}

void quantize_fp8(Call& call) {
  auto args = sized<tilemoe_quantize_fp8_args>();
  args.device = call.device;
  args.block_rows = kTile;
  args.float_scales = call.kind<int32_t>("float_scales");
  args.values = call.tensor("values");
  args.codes = static_cast<uint8_t*>(call.memory("codes"));
  args.scales = static_cast<float*>(call.memory("scales"));
  args.transposed_codes = static_cast<uint8_t*>(call.memory("transposed_codes"));
  args.transposed_scales = static_cast<float*>(call.memory("transposed_scales"));
  args.stream = call.stream;
  check(tilemoe_quantize_fp8(&args));
}

}  // namespace tilemoe_jax
