// The structs that the calls of the layer share (experts, weights, routing, a part), read from the
// caller's structs and checked.
#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>

#include "core/backend.h"
#include "core/overlap.h"

namespace tilemoe {

tilemoe_experts read_experts(const tilemoe_experts* experts);
// The complete spec. Throws unless it has the E and the device of the experts.
tilemoe_routing_spec read_spec(const tilemoe_routing_spec* spec, const tilemoe_experts& experts);

// T, or the rows of the grouped entry: those of X, O, dO and dX.
int64_t outer_rows(const tilemoe_routing_spec& spec);

tilemoe_routing read_routing_of(const tilemoe_routing* given, const tilemoe_experts& experts);
std::optional<tilemoe_part> read_part(const tilemoe_part* given, const tilemoe_routing_spec& spec);

// Whether the up rows have tensors of their own (W1_up, b1_up).
bool split(const tilemoe_experts& experts);
const char* recipe_name(const tilemoe_experts& experts);
// Rows of W1 itself: 2n, or n if the up rows have a tensor of their own or the activation no gate.
int64_t w1_rows(const tilemoe_experts& experts);
// The alignment of codes of rows.
inline constexpr uintptr_t kFp8RowAlignment = 16;
// W1 (E, rows, d) or its gradient.
bool contiguous_along_d(const tilemoe_tensor& W1);

void check_weights(const tilemoe_experts& experts, const tilemoe_weights& weights);
// X, O, dO, dX and addends: outer rows of width d.
void check_rows(const char* name, const tilemoe_tensor& tensor, const tilemoe_experts& experts,
                const tilemoe_routing_spec& spec);
void check_optional_rows(const char* name, const tilemoe_tensor& tensor,
                         const tilemoe_experts& experts, const tilemoe_routing_spec& spec);
// The part of a saved H that a call uses: its values, and if they are codes, saved.H as the memory of
// dH.
struct SavedH {
  bool values = true, memory_of_dH = false;
};
void check_H(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
             const tilemoe_saved& saved, SavedH needed = {});
// Bytes of H_codes and of H_scales.
size_t fp8_H_code_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec);
size_t fp8_H_scale_bytes(const tilemoe_experts& experts, const tilemoe_routing_spec& spec);
// Both as the memory of a call, if they are given.
void use_fp8_H(MemoryUse& memory, const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
               const tilemoe_saved& saved, bool writes);
void check_ds(const tilemoe_tensor& ds, const tilemoe_routing_spec& spec);
void check_block_turns(int32_t turns);

void read_weights_and_routing(MemoryUse& memory, const tilemoe_weights& weights,
                              const tilemoe_routing& routing,
                              const std::optional<tilemoe_part>& part);

}  // namespace tilemoe
