// Low-rank adapters in the calls of the layer: read, checked, packed, and as the arguments of steps.
#pragma once

#include <cstddef>
#include <cstdint>

#include "core/backend.h"
#include "core/overlap.h"

namespace tilemoe {

// Whether H's columns are in the order of W1's rows, gate and up alternating
// (cuda/core/gemm_steps.h).
bool interleaves_H(const tilemoe_experts& experts, const tilemoe_tensor& W1);
// The rows of B1, or of its gradient, as H's columns.
UpParts columns_of_H(const tilemoe_experts& experts, const tilemoe_tensor& W1,
                     const tilemoe_tensor& B1);
void check_scale(const char* name, float scale);

// The adapters of a call, or zeros without any. Throws unless they fit the experts and the weights.
tilemoe_packed_lora read_lora(const tilemoe_packed_lora* given, const tilemoe_experts& experts,
                              const tilemoe_weights& weights);
// The gradients of a call, or zeros.
tilemoe_lora read_lora_gradients(const tilemoe_lora* given, const tilemoe_experts& experts,
                                 const tilemoe_weights& weights, const tilemoe_packed_lora& lora);

// P1 (capacity, rank_1) and P2.
void check_P(const tilemoe_experts& experts, const tilemoe_routing_spec& spec,
             const tilemoe_saved& saved);
void read_lora_memory(MemoryUse& memory, const tilemoe_packed_lora& lora);
void write_lora_memory(MemoryUse& memory, const tilemoe_lora& gradients);

// The gradients of W1's adapters, or of W2's, as arguments of steps: what they read is left out.
// Returns their number, up to 2.
int lora_gradients_1(const tilemoe_experts& experts, const tilemoe_weights& weights,
                     const tilemoe_packed_lora& lora, const tilemoe_lora& gradients,
                     const tilemoe_tensor& P1, const tilemoe_tensor& Q1, LoraGradient* steps);
LoraGradient lora_gradient_2(const tilemoe_packed_lora& lora, const tilemoe_lora& gradients);

// The factors in `memory`, of packed_lora_bytes or null; scales and rank_gate are zero.
tilemoe_packed_lora packed_at(void* memory, const tilemoe_experts& experts,
                              const tilemoe_weights& weights);
size_t packed_lora_bytes(const tilemoe_experts* experts);
// packed_at() with the caller's scales and rank_gate.
tilemoe_packed_lora bind_packed_lora(const tilemoe_experts* experts, const tilemoe_weights* weights,
                                     void* memory, size_t bytes, const tilemoe_packed_lora* packed);
tilemoe_packed_lora pack_lora(const tilemoe_experts* experts, const tilemoe_pack_lora_args* args);

}  // namespace tilemoe
