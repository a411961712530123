// The entries of routing: each checks its arguments and calls the backend of the device.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

void top_k(const tilemoe_top_k_args* args);
void top_k_scores(const tilemoe_top_k_scores_args* args);
void route_top_k(tilemoe_routing* routing, const tilemoe_route_top_k_args* args);
// `spec` is complete.
size_t route_tokens_workspace_bytes(const tilemoe_routing_spec& spec, int64_t d);
void route_tokens(tilemoe_routing* routing, const tilemoe_route_tokens_args* args);
void route_general(tilemoe_routing* routing, const tilemoe_route_general_args* args);
void route_rounded(tilemoe_routing* routing, const tilemoe_route_rounded_args* args);
void route_grouped(tilemoe_routing* routing, const tilemoe_route_grouped_args* args);
void router_backward(const tilemoe_router_backward_args* args);
size_t router_losses_workspace_bytes(tilemoe_device device, int64_t T, int64_t E);
void router_losses(const tilemoe_router_losses_args* args);
size_t router_logits_workspace_bytes(tilemoe_device device, int64_t T, int64_t E, int64_t d,
                                     tilemoe_dtype weight);
void router_logits(const tilemoe_router_logits_args* args);

}  // namespace tilemoe
