// The CPU backend: it runs on any machine, and is the reference in tests of other backends. It has
// one file per step, which defines the tasks of the step.
#pragma once

#include "core/backend.h"

namespace tilemoe::cpu {

// The backend. The first call starts the threads, so that no step does. Throws Error(kUnsupported)
// in a build without it (cpu/absent.cpp).
const Backend& backend();

void up_projection(const UpProjection& step);
void down_projection(const DownProjection& step);
void combine(const Combine& step);
void activation_gradient(const ActivationGradient& step);
void score_gradient(const ScoreGradient& step);
void weight_gradient_2(const WeightGradient2& step);
void input_gradient(const InputGradient& step);
void weight_gradient_1(const WeightGradient1& step);
void bias_gradient(const BiasGradient& step);

size_t routing_scratch_bytes(const tilemoe_routing_spec& spec);
size_t route_tokens_scratch_bytes(const tilemoe_routing_spec& spec, int64_t d);
size_t router_losses_scratch_bytes(int64_t T, int64_t E);
void top_k(const tilemoe_top_k_args& args);
void top_k_scores(const tilemoe_top_k_scores_args& args);
void route_top_k(const tilemoe_routing& routing, const tilemoe_route_top_k_args& args);
void route_tokens(const tilemoe_routing& routing, const tilemoe_route_tokens_args& args);
void route_general(const tilemoe_routing& routing, const tilemoe_route_general_args& args);
void route_rounded(const tilemoe_routing& routing, const tilemoe_route_rounded_args& args);
void route_grouped(const tilemoe_routing& routing, const tilemoe_route_grouped_args& args);
void router_backward(const tilemoe_router_backward_args& args);
void router_losses(const tilemoe_router_losses_args& args);

void sum_rows(const tilemoe_sum_rows_args& args);

}  // namespace tilemoe::cpu
