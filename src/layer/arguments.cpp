#include "layer/arguments.h"

#include <cmath>
#include <tuple>
#include <utility>

#include "core/activation_kinds.h"
#include "core/check.h"
#include "core/formats.h"
#include "core/overlap.h"
#include "layer/workspace.h"
#include "routing/spec.h"

namespace tilemoe {
namespace {

using namespace limits;

constexpr uintptr_t kScaleAlignment = 8;  // gate and up are read at once
constexpr int64_t kFp8Multiple = 16;      // of d and n: a row of codes is a multiple of 16 bytes

const char* contiguous_dimension(const tilemoe_tensor& W1) {
  return contiguous_along_d(W1) ? "d" : "n";
}

void check_activation(const tilemoe_experts& experts) {
  const ActivationKind kind = activation_kind(experts.activation);
  TILEMOE_CHECK(kind.name != nullptr, "activation is " << static_cast<int>(experts.activation)
                                                       << ", expected a tilemoe_activation");
  TILEMOE_CHECK(
      experts.gate_layout >= TILEMOE_GATE_CONCATENATED && experts.gate_layout <= TILEMOE_GATE_SPLIT,
      "gate_layout is " << static_cast<int>(experts.gate_layout) << ", expected a value in [0, 2]");
  TILEMOE_CHECK(kind.gated || experts.gate_layout == TILEMOE_GATE_CONCATENATED,
                "gate_layout is " << static_cast<int>(experts.gate_layout)
                                  << ", expected 0: " << kind.name << " has no gate");
  const bool shaped = experts.clamp != 0 || experts.alpha != 0 || experts.up_shift != 0;
  TILEMOE_CHECK(!shaped || experts.activation == TILEMOE_SWIGLU,
                "clamp, alpha and up_shift require the activation swiglu, got " << kind.name);
  TILEMOE_CHECK(std::isfinite(experts.clamp) && experts.clamp >= 0 &&
                    std::isfinite(experts.alpha) && std::isfinite(experts.up_shift),
                "clamp is " << experts.clamp << ", alpha is " << experts.alpha << ", up_shift is "
                            << experts.up_shift << ": expected finite numbers and clamp >= 0");
}

// H as codes is read by the GEMMs of the recipe fp8 alone.
void check_format_H(const tilemoe_experts& experts) {
  TILEMOE_CHECK(
      experts.format_H >= TILEMOE_FORMAT_NONE && experts.format_H <= TILEMOE_FORMAT_NVFP4,
      "format_H is " << static_cast<int>(experts.format_H) << ", expected a tilemoe_format");
  if (experts.format_H == TILEMOE_FORMAT_NONE) return;
  TILEMOE_CHECK_SUPPORTED(saves_fp8_H(experts), "format_H is "
                                                    << tilemoe_format_name(experts.format_H)
                                                    << ", expected none or fp8");
  TILEMOE_CHECK_SUPPORTED(
      is_fp8_backward(experts),
      "format_H is fp8, which requires the recipe fp8, but recipe is " << recipe_name(experts));
}

// The fp8 recipes are not computed for every layer; quantized.cpp checks the order of the codes.
void check_recipe(const tilemoe_experts& experts) {
  TILEMOE_CHECK(
      experts.recipe >= TILEMOE_RECIPE_BF16 && experts.recipe <= TILEMOE_RECIPE_FP8_FORWARD,
      "recipe is " << static_cast<int>(experts.recipe) << ", expected a value in [0, 2]");
  check_flag("float_scales", experts.float_scales);
  check_format_H(experts);
  if (experts.recipe == TILEMOE_RECIPE_BF16) {
    TILEMOE_CHECK(experts.float_scales == 0,
                  "float_scales is 1, expected 0: it requires the recipe fp8 or fp8_forward");
    return;
  }
  TILEMOE_CHECK_SUPPORTED(
      experts.format_1 == TILEMOE_FORMAT_FP8 && experts.format_2 == TILEMOE_FORMAT_FP8,
      "recipe is " << recipe_name(experts)
                   << ", which requires weights of the format fp8, but format_1 is "
                   << tilemoe_format_name(experts.format_1) << " and format_2 is "
                   << tilemoe_format_name(experts.format_2));
  TILEMOE_CHECK_SUPPORTED(tilemoe_activation_gated(experts.activation) != 0,
                          "recipe is "
                              << recipe_name(experts)
                              << ", which requires an activation with a gate, but activation is "
                              << tilemoe_activation_name(experts.activation));
  for (const auto& [name, width] : {std::pair("d", experts.d), std::pair("n", experts.n)})
    TILEMOE_CHECK_SUPPORTED(width % kFp8Multiple == 0,
                            "recipe is " << recipe_name(experts) << ", which requires " << name
                                         << " to be a multiple of " << kFp8Multiple << ", got "
                                         << width);
  TILEMOE_CHECK_SUPPORTED(experts.gate_layout != TILEMOE_GATE_INTERLEAVED,
                          "recipe is " << recipe_name(experts)
                                       << ", which does not support the gate_layout interleaved");
  TILEMOE_CHECK_SUPPORTED(split(experts) || experts.n % kFp8Tile == 0,
                          "recipe is " << recipe_name(experts)
                                       << ", which requires n to be a multiple of " << kFp8Tile
                                       << " with the gate_layout concatenated, got " << experts.n
                                       << ": gate and up would share scales");
  TILEMOE_CHECK_SUPPORTED(
      experts.recipe == TILEMOE_RECIPE_FP8_FORWARD || (experts.rank_1 == 0 && experts.rank_2 == 0),
      "recipe is fp8, which does not support adapters, but rank_1 is "
          << experts.rank_1 << " and rank_2 is " << experts.rank_2 << "; use fp8_forward");
}

void check_fits(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  TILEMOE_CHECK(experts.device == spec.device,
                "experts.device is " << static_cast<int>(experts.device) << ", expected "
                                     << static_cast<int>(spec.device) << ", the routing's");
  TILEMOE_CHECK(experts.E == spec.E,
                "experts.E is " << experts.E << ", expected " << spec.E << ", the routing's");
}

}  // namespace

bool split(const tilemoe_experts& experts) {
  return experts.gate_layout == TILEMOE_GATE_SPLIT;
}
const char* recipe_name(const tilemoe_experts& experts) {
  if (!is_fp8(experts)) return "bf16";
  return is_fp8_backward(experts) ? "fp8" : "fp8_forward";
}
int64_t w1_rows(const tilemoe_experts& experts) {
  return split(experts) ? experts.n : h_width(experts);
}

bool contiguous_along_d(const tilemoe_tensor& W1) {
  return W1.stride[2] == 1;
}

tilemoe_experts read_experts(const tilemoe_experts* given) {
  const tilemoe_experts experts = read_struct("experts", given);
  TILEMOE_CHECK(is_float(experts.dtype), "experts.dtype is "
                                             << tilemoe_dtype_name(experts.dtype)
                                             << ", expected float32, bfloat16 or float16");
  TILEMOE_CHECK(experts.E >= 1 && experts.E <= kMaxExperts,
                "E is " << experts.E << ", expected a value in [1, " << kMaxExperts << "]");
  for (const auto& [name, width] : {std::pair("d", experts.d), std::pair("n", experts.n)})
    TILEMOE_CHECK(width >= kWidthMultiple && width % kWidthMultiple == 0 && width <= kMaxWidth,
                  name << " is " << width << ", expected a positive multiple of " << kWidthMultiple
                       << ", at most " << kMaxWidth);
  check_activation(experts);
  TILEMOE_CHECK(experts.column_blocks >= 0,
                "column_blocks is " << experts.column_blocks << ", expected at least 0");
  const int32_t max_rank_1 = TILEMOE_MAX_RANK * (split(experts) ? 2 : 1);
  for (const auto& [name, rank, limit] : {std::tuple("rank_1", experts.rank_1, max_rank_1),
                                          std::tuple("rank_2", experts.rank_2, TILEMOE_MAX_RANK)})
    TILEMOE_CHECK(rank >= 0 && rank % kWidthMultiple == 0 && rank <= limit,
                  name << " is " << rank << ", expected a multiple of " << kWidthMultiple
                       << ", at most " << limit);
  for (const auto& [name, format] :
       {std::pair("format_1", experts.format_1), std::pair("format_2", experts.format_2)})
    TILEMOE_CHECK(format >= TILEMOE_FORMAT_NONE && format <= TILEMOE_FORMAT_NVFP4,
                  name << " is " << static_cast<int>(format) << ", expected a tilemoe_format");
  TILEMOE_CHECK(experts.weight_blocks >= 0,
                "weight_blocks is " << experts.weight_blocks << ", expected at least 0");
  check_reserved("experts", experts.reserved);
  check_reserved("experts", experts.reserved_2);
  check_recipe(experts);
  const int64_t matrix = checked_product(h_width(experts), experts.d, "2n * d");
  checked_product(checked_product(experts.E, matrix, "E * 2n * d"), 4, "bytes of W1");
  return experts;
}

tilemoe_routing_spec read_spec(const tilemoe_routing_spec* given, const tilemoe_experts& experts) {
  const tilemoe_routing_spec spec = complete(given);
  check_fits(experts, spec);
  return spec;
}

int64_t outer_rows(const tilemoe_routing_spec& spec) {
  return spec.kind == TILEMOE_ROUTING_GROUPED ? spec.capacity : spec.T;
}

tilemoe_routing read_routing_of(const tilemoe_routing* given, const tilemoe_experts& experts) {
  const tilemoe_routing routing = read_routing(given);
  check_fits(experts, routing.spec);
  return routing;
}

std::optional<tilemoe_part> read_part(const tilemoe_part* given, const tilemoe_routing_spec& spec) {
  if (given == nullptr) return {};
  const tilemoe_part part = read_struct("part", given);
  check_reserved("part", part.reserved);
  check_flag("part.last", part.last);
  TILEMOE_CHECK(spec.kind != TILEMOE_ROUTING_GROUPED,
                "part is given, expected null with grouped routing");
  TILEMOE_CHECK(part.begins != nullptr && part.ends != nullptr,
                "part.begins or part.ends is null, expected (E) int32 of each");
  TILEMOE_CHECK(part.first_token >= 0 && part.first_token <= spec.T && part.tokens >= 0 &&
                    part.tokens <= spec.T - part.first_token,
                "part has " << part.tokens << " tokens from token " << part.first_token
                            << ", expected tokens in [0, " << spec.T << ")");
  return part;
}

void check_weights(const tilemoe_experts& experts, const tilemoe_weights& weights) {
  const DTypes dtype = {experts.dtype};
  const int64_t E = experts.E, d = experts.d, n = experts.n;
  const char* not_split = "it requires the split gate layout";
  const auto check_weight = [&](const char* name, const tilemoe_tensor& weight, int64_t rows,
                                int64_t columns, tilemoe_format format) {
    if (format != TILEMOE_FORMAT_NONE)
      return check_absent(name, weight, "a quantised weight is passed in `quantized`");
    check_tensor(name, weight, {{E, rows, columns}, dtype, Strides::kMatrixEitherMajor});
  };
  check_weight("weights.W1", weights.W1, w1_rows(experts), d, experts.format_1);
  check_weight("weights.W2", weights.W2, d, n, experts.format_2);
  check_optional("weights.b1", weights.b1, {{E, w1_rows(experts)}, dtype, Strides::kRows});
  check_optional("weights.b2", weights.b2, {{E, d}, dtype, Strides::kRows});
  if (!split(experts)) {
    check_absent("weights.W1_up", weights.W1_up, not_split);
    check_absent("weights.b1_up", weights.b1_up, not_split);
    return;
  }
  check_weight("weights.W1_up", weights.W1_up, n, d, experts.format_1);
  TILEMOE_CHECK(contiguous_along_d(weights.W1) == contiguous_along_d(weights.W1_up),
                "weights.W1 is contiguous along "
                    << contiguous_dimension(weights.W1) << " and weights.W1_up along "
                    << contiguous_dimension(weights.W1_up) << ", expected the same");
  check_optional("weights.b1_up", weights.b1_up, {{E, n}, dtype, Strides::kRows});
  TILEMOE_CHECK(present(weights.b1) == present(weights.b1_up),
                "weights.b1 is " << describe(weights.b1) << " and b1_up is "
                                 << describe(weights.b1_up) << ": give both or neither");
}

void check_rows(const char* name, const tilemoe_tensor& tensor, const tilemoe_experts& experts,
                const tilemoe_routing_spec& spec) {
  check_tensor(name, tensor, {{outer_rows(spec), experts.d}, {experts.dtype}, Strides::kRows});
}
void check_optional_rows(const char* name, const tilemoe_tensor& tensor,
                         const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  if (present(tensor)) check_rows(name, tensor, experts, spec);
}

void check_H(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
             const tilemoe_saved& saved, SavedH needed) {
  check_reserved("saved", saved.reserved);
  const TensorRule rows{{spec.capacity, h_width(experts)}, {experts.dtype}};
  if (!saves_fp8_H(experts)) {
    check_tensor("saved.H", saved.H, rows);
    TILEMOE_CHECK(saved.H_codes == nullptr && saved.H_scales == nullptr,
                  "saved.H_codes or H_scales is given, expected null: experts.format_H is none");
    return;
  }
  if (needed.memory_of_dH)
    check_tensor("saved.H", saved.H, rows);
  else
    check_absent("saved.H", saved.H,
                 "experts.format_H is fp8, and the call neither writes nor reads dH there");
  if (!needed.values) return;
  TILEMOE_CHECK(spec.capacity == 0 || (saved.H_codes != nullptr && saved.H_scales != nullptr),
                "saved.H_codes or H_scales is null, expected both: experts.format_H is fp8");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(saved.H_codes) % kFp8RowAlignment == 0,
                "saved.H_codes is not aligned to " << kFp8RowAlignment << " bytes");
  TILEMOE_CHECK(reinterpret_cast<uintptr_t>(saved.H_scales) % kScaleAlignment == 0,
                "saved.H_scales is not aligned to " << kScaleAlignment << " bytes");
}

size_t fp8_H_code_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  return static_cast<size_t>(checked_product(spec.capacity, h_width(experts), "bytes of H_codes"));
}
size_t fp8_H_scale_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  const int64_t of_row = 2 * blocks_of(experts.n, kFp8Tile) * int64_t{sizeof(float)};
  return static_cast<size_t>(checked_product(spec.capacity, of_row, "bytes of H_scales"));
}
void use_fp8_H(MemoryUse& memory, const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
               const tilemoe_saved& saved, bool writes) {
  if (saved.H_codes == nullptr) return;
  const auto use = [&](const char* name, const void* data, size_t bytes) {
    writes ? memory.writes(name, data, bytes) : memory.reads(name, data, bytes);
  };
  use("saved.H_codes", saved.H_codes, fp8_H_code_bytes(experts, spec));
  use("saved.H_scales", saved.H_scales, fp8_H_scale_bytes(experts, spec));
}

void check_ds(const tilemoe_tensor& ds, const tilemoe_routing_spec& spec) {
  const bool top_k = spec.kind == TILEMOE_ROUTING_TOP_K;
  const TensorRule flat{{spec.pairs}, {TILEMOE_FLOAT32}, Strides::kContiguous, false};
  const TensorRule of_top_k{{spec.T, spec.K}, {TILEMOE_FLOAT32}, Strides::kContiguous, false};
  check_optional("ds", ds, top_k && ds.ndim == 2 ? of_top_k : flat);
}

void check_block_turns(int32_t turns) {
  TILEMOE_CHECK(turns >= 0 && turns <= kMaxBlockTurns, "block_turns is "
                                                           << turns << ", expected a value in [0, "
                                                           << kMaxBlockTurns << "]");
}

void read_weights_and_routing(MemoryUse& memory, const tilemoe_weights& weights,
                              const tilemoe_routing& routing,
                              const std::optional<tilemoe_part>& part) {
  memory.reads("weights.W1", weights.W1);
  memory.reads("weights.W1_up", weights.W1_up);
  memory.reads("weights.W2", weights.W2);
  memory.reads("weights.b1", weights.b1);
  memory.reads("weights.b1_up", weights.b1_up);
  memory.reads("weights.b2", weights.b2);
  memory.reads("routing", routing.offsets, routing_bytes(routing.spec));
  if (!part) return;
  const size_t bytes = static_cast<size_t>(routing.spec.E) * sizeof(int32_t);
  memory.reads("part.begins", part->begins, bytes);
  memory.reads("part.ends", part->ends, bytes);
}

}  // namespace tilemoe
