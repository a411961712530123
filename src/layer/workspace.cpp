#include "layer/workspace.h"

#include <algorithm>
#include <initializer_list>

#include "core/check.h"
#include "core/formats.h"
#include "layer/arguments.h"
#include "layer/quantized.h"

namespace tilemoe {
namespace {

constexpr size_t kRegionAlignment = 256;

// Regions of the caller's workspace, one after the other.
class Plan {
 public:
  size_t take(size_t bytes) {
    const size_t place = used_;
    used_ = static_cast<size_t>(checked_sum(static_cast<int64_t>(used_),
                                            static_cast<int64_t>(round_up(bytes, kRegionAlignment)),
                                            "workspace"));
    return place;
  }
  ScratchRegion take_scratch(size_t bytes) { return {take(bytes), bytes}; }
  size_t used() const { return used_; }

 private:
  size_t used_ = 0;
};

Fp8Region take_codes(Plan& plan, int64_t rows, int64_t width) {
  const auto bytes = [rows](int64_t of_row) {
    return static_cast<size_t>(checked_product(rows, of_row, "codes of rows"));
  };
  const size_t codes = plan.take(bytes(width));
  return {codes, plan.take(bytes(blocks_of(width, kFp8Tile) * int64_t{sizeof(float)}))};
}

size_t dX_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  return static_cast<size_t>(checked_product(outer_rows(spec), experts.d, "T * d")) *
         tilemoe_dtype_size(experts.dtype);
}

size_t ds_partial_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec) {
  const int64_t partials = checked_product(ds_groups(experts.n), spec.capacity, "ds partials");
  return static_cast<size_t>(checked_product(partials, sizeof(float), "ds partials"));
}

}  // namespace

int64_t h_width(const tilemoe_experts& experts) {
  return tilemoe_activation_gated(experts.activation) != 0 ? 2 * experts.n : experts.n;
}

size_t row_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec, int64_t width) {
  const auto element = static_cast<int64_t>(tilemoe_dtype_size(experts.dtype));
  return static_cast<size_t>(checked_product(
      checked_product(spec.capacity, width, "capacity * width"), element, "workspace"));
}

int64_t rows_of_an_expert(const tilemoe_routing_spec& spec) {
  const bool once_a_token =
      spec.kind == TILEMOE_ROUTING_TOP_K || spec.kind == TILEMOE_ROUTING_ROUNDED;
  return once_a_token ? spec.T : INT64_MAX;
}

int64_t output_block_columns(const tilemoe_experts& experts) {
  const int64_t blocks = std::max<int64_t>(experts.column_blocks, 1);
  const int64_t columns = (experts.d + blocks - 1) / blocks;
  const int64_t multiple = is_fp8(experts) ? kFp8Tile : 64;
  return blocks == 1 ? columns : std::min(experts.d, blocks_of(columns, multiple) * multiple);
}

namespace {

// The codes of dH with their scales, or A' with the partial sums of ds, in 16-bit columns.
int64_t code_columns(const tilemoe_experts& experts) {
  return experts.n + experts.n / 32;
}

// d columns in the fewest blocks that fit in `room` columns.
int64_t columns_of_fewest_blocks(int64_t d, int64_t room) {
  return blocks_of(d, blocks_of(d, room));
}

// The same, rounded up to the first of `multiples` with which a block fits; 0 if none does.
int64_t fitting_columns(int64_t d, int64_t room, std::initializer_list<int64_t> multiples) {
  const int64_t min_columns = columns_of_fewest_blocks(d, room);
  for (const int64_t multiple : multiples)
    if (const int64_t whole = blocks_of(min_columns, multiple) * multiple; whole <= room)
      return std::min(d, whole);
  return 0;
}

// Columns of dX~ next to the codes of dH. (Codes of H, if it has any, are in the same place.)
int64_t columns_next_to_codes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                              int64_t columns) {
  const int64_t d = experts.d, codes = code_columns(experts);
  const double of_dW1 = static_cast<double>(experts.E) * static_cast<double>(h_width(experts)) *
                        static_cast<double>(d) /
                        static_cast<double>(std::max<int64_t>(spec.capacity, 1));
  const int64_t place =
      std::max(columns, static_cast<int64_t>(std::min(of_dW1, static_cast<double>(d + codes))));
  const int64_t room = std::max(place + place / 32 - codes, std::min(columns, blocks_of(d, 4)));
  if (const int64_t fitting = fitting_columns(d, room, {2 * kFp8Tile, kFp8Tile})) return fitting;
  return std::min(d, blocks_of(columns_of_fewest_blocks(d, room), kFp8Tile) * kFp8Tile);
}

}  // namespace

bool writes_dH_codes(const Backend& backend, const tilemoe_experts& experts) {
  return is_fp8_backward(experts) && !saves_fp8_H(experts) &&
         2 * code_columns(experts) <= experts.n + output_block_columns(experts) &&
         backend.writes_dH_codes != nullptr && backend.writes_dH_codes(experts);
}

int64_t input_block_columns(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
                            bool dH_over_H) {
  const int64_t columns = output_block_columns(experts);
  if (dH_over_H && is_fp8_backward(experts)) return columns_next_to_codes(experts, spec, columns);
  if (columns == experts.d || !dH_over_H) return columns;
  const int64_t fitting = fitting_columns(experts.d, experts.n + columns, {256, 64});
  return fitting > 0 ? fitting : columns;
}

ForwardPlan::ForwardPlan(const Backend& backend, const tilemoe_experts& experts,
                         const tilemoe_routing_spec& spec, bool saves, const KernelPlan& kernels,
                         Gemms gemms) {
  const ScratchSizes sizes{.capacity = spec.capacity,
                           .rows_of_an_expert = rows_of_an_expert(spec),
                           .plan = kernels.get()};
  const Steps& steps = backend.steps;
  Plan plan;
  const bool fp8 = is_fp8(experts);
  const bool has_A = gemms == Gemms::kBoth && (!fp8 || experts.rank_2 > 0);
  A = plan.take(has_A ? row_bytes(experts, spec, experts.n) : 0);
  if (fp8) A_codes = take_codes(plan, spec.capacity, experts.n);
  P1 = plan.take(saves ? 0 : row_bytes(experts, spec, experts.rank_1));
  P2 = plan.take(saves ? 0 : row_bytes(experts, spec, experts.rank_2));
  scratch = plan.take_scratch(std::max({steps.lora_P1.scratch_bytes(experts, sizes),
                                        steps.up_projection.scratch_bytes(experts, sizes),
                                        steps.down_projection.scratch_bytes(experts, sizes)}));
  Plan up = plan, down = plan;
  if (fp8) X_codes = take_codes(up, outer_rows(spec), experts.d);
  W1 = up.take(fp8 ? 0 : dequantized_bytes_1(experts));
  block_columns = output_block_columns(experts);
  Y = down.take(gemms == Gemms::kFirst ? 0 : row_bytes(experts, spec, block_columns));
  W2 = down.take(fp8 ? 0 : dequantized_bytes_2(experts));
  total = std::max(up.used(), down.used());
}

BackwardPlan::BackwardPlan(const Backend& backend, const tilemoe_experts& experts,
                           const tilemoe_routing_spec& spec, const BackwardWork& work,
                           const KernelPlan& kernels) {
  const ScratchSizes sizes{.capacity = spec.capacity,
                           .rows_of_an_expert = rows_of_an_expert(spec),
                           .dW1 = work.wants(TILEMOE_GRADIENT_W1),
                           .dW1_up = work.wants(TILEMOE_GRADIENT_W1_UP),
                           .plan = kernels.get()};
  const Steps& steps = backend.steps;
  const bool fp8 = is_fp8_backward(experts);
  Plan all;
  const auto end = [&](const Plan& plan) { total = std::max(total, plan.used()); };
  // The scratch of a step that runs while what `plan` has taken lives.
  const auto scratch_after = [&](Plan plan, const auto& step) {
    const ScratchRegion region = plan.take_scratch(step.scratch_bytes(experts, sizes));
    end(plan);
    return region;
  };
  if (work.needs_dH() && !work.dH_over_H) dH = all.take(row_bytes(experts, spec, h_width(experts)));
  end(all);
  writes_dH_codes = work.dX_is_free && work.wants(TILEMOE_GRADIENT_X) &&
                    work.needs_activation_gradient() && tilemoe::writes_dH_codes(backend, experts);
  if (writes_dH_codes) dH_codes = take_codes(all, 2 * spec.capacity, experts.n);

  if (work.needs_activation_gradient()) {
    Plan activation = all;
    if (work.wants(BackwardWork::kNeedsAScaled) && !A_scaled_over_codes(experts, work))
      A_scaled = activation.take(row_bytes(experts, spec, experts.n));
    if (experts.rank_2 > 0) Q2 = activation.take(row_bytes(experts, spec, experts.rank_2));
    if (work.wants(TILEMOE_GRADIENT_LORA_2) && experts.rank_2 > 0)
      lora_2_scratch = scratch_after(activation, steps.lora_gradient_2);
    if (work.wants(TILEMOE_GRADIENT_W2)) {
      const size_t bytes = steps.weight_gradient_2.scratch_bytes(experts, sizes);
      dW2_scratch_in_dX = writes_dH_codes && bytes <= dX_bytes(experts, spec);
      dW2_scratch = dW2_scratch_in_dX ? ScratchRegion{0, bytes}
                                      : scratch_after(activation, steps.weight_gradient_2);
    }
    // The partial sums of ds outlive Q2's scratch: those of a part exist when the next one begins.
    if (work.wants(TILEMOE_GRADIENT_S))
      ds_partial = activation.take(ds_partial_bytes(experts, spec));
    if (experts.rank_2 > 0)
      Q2_scratch = scratch_after(
          activation, work.wants(TILEMOE_GRADIENT_LORA_2) ? steps.lora_Q2 : steps.lora_P2);
    W2 = activation.take(fp8 ? 0 : dequantized_bytes_2(experts));
    if (fp8 && !writes_dH_codes) dO_codes = take_codes(activation, outer_rows(spec), experts.d);
    activation_scratch = scratch_after(activation, steps.activation_gradient);
  }
  block_columns = input_block_columns(experts, spec, work.dH_over_H);
  if (work.needs_Q1(experts)) {
    Q1 = all.take(row_bytes(experts, spec, experts.rank_1));
    Q1_scratch =
        scratch_after(all, work.wants(TILEMOE_GRADIENT_LORA_1) ? steps.lora_Q1 : steps.lora_P1);
  }
  if (work.wants(TILEMOE_GRADIENT_X)) {
    Plan dX = all;
    dX_rows = dX.take(row_bytes(experts, spec, block_columns));
    W1 = dX.take(fp8 ? 0 : dequantized_bytes_1(experts));
    if (fp8 && !writes_dH_codes && !consumes_codes(experts, work))
      dH_codes = take_codes(dX, 2 * spec.capacity, experts.n);
    dX_scratch = scratch_after(dX, steps.input_gradient);
  }
  if (work.wants(TILEMOE_GRADIENT_W1 | TILEMOE_GRADIENT_W1_UP))
    dW1_scratch = scratch_after(all, steps.weight_gradient_1);
  if (work.wants(TILEMOE_GRADIENT_LORA_1) && experts.rank_1 > 0)
    lora_1_scratch = scratch_after(all, steps.lora_gradient_1);
  if (work.wants(TILEMOE_GRADIENT_B1 | TILEMOE_GRADIENT_B1_UP | TILEMOE_GRADIENT_B2))
    bias_scratch = scratch_after(all, steps.bias_gradient);
}

}  // namespace tilemoe
