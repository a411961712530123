#pragma once

#include <torch/csrc/stable/library.h>

#include "operators.h"
#include "verification.h"

namespace tilemoe_torch {

// The same functions serve every dispatch key: only the Call that is linked differs.
inline void register_operators(torch::stable::detail::StableLibrary& m) {
  m.impl("top_k", TORCH_BOX(&top_k));
  m.impl("router_logits", TORCH_BOX(&router_logits));
  m.impl("scores_at", TORCH_BOX(&scores_at));
  m.impl("top_k_backward", TORCH_BOX(&top_k_backward));
  m.impl("route_logits", TORCH_BOX(&route_logits));
  m.impl("route_top_k", TORCH_BOX(&route_top_k));
  m.impl("route_general", TORCH_BOX(&route_general));
  m.impl("route_rounded", TORCH_BOX(&route_rounded));
  m.impl("route_grouped", TORCH_BOX(&route_grouped));
  m.impl("experts", TORCH_BOX(&experts));
  m.impl("moe", TORCH_BOX(&moe));
  m.impl("moe_tokens", TORCH_BOX(&moe_tokens));
  m.impl("moe_with_router", TORCH_BOX(&moe_with_router));
  m.impl("moe_with_router_backward", TORCH_BOX(&moe_with_router_backward));
  m.impl("moe_with_router_backward_over_H", TORCH_BOX(&moe_with_router_backward_over_H));
  m.impl("experts_backward", TORCH_BOX(&experts_backward));
  m.impl("experts_backward_over_H", TORCH_BOX(&experts_backward_over_H));
  m.impl("experts_backward_out", TORCH_BOX(&experts_backward_out));
  m.impl("experts_part", TORCH_BOX(&experts_part));
  m.impl("experts_backward_part", TORCH_BOX(&experts_backward_part));
  m.impl("pack_lora", TORCH_BOX(&pack_lora));
  m.impl("experts_lora", TORCH_BOX(&experts_lora));
  m.impl("experts_lora_backward", TORCH_BOX(&experts_lora_backward));
  m.impl("experts_lora_backward_over_H", TORCH_BOX(&experts_lora_backward_over_H));
  m.impl("quantize_fp8", TORCH_BOX(&quantize_fp8));
  m.impl("quantize_fp8_into", TORCH_BOX(&quantize_fp8_into));
  m.impl("dequantize", TORCH_BOX(&dequantize));
  m.impl("layer_bytes", TORCH_BOX(&layer_bytes));
  m.impl("router_backward", TORCH_BOX(&router_backward));
  m.impl("router_losses", TORCH_BOX(&router_losses));
  m.impl("router_losses_backward", TORCH_BOX(&router_losses_backward));
  m.impl("gathered_mm", TORCH_BOX(&gathered_mm));
  m.impl("gathered_mm_backward", TORCH_BOX(&gathered_mm_backward));
  m.impl("combine_mm", TORCH_BOX(&combine_mm));
  m.impl("combine_mm_backward", TORCH_BOX(&combine_mm_backward));
  m.impl("sum_rows", TORCH_BOX(&sum_rows));
  m.impl("device_description", TORCH_BOX(&device_description));
  m.impl("verification_cases", TORCH_BOX(&verification_cases));
  m.impl("verify_case", TORCH_BOX(&verify_case));
}

}  // namespace tilemoe_torch
