// The steps of the routing that have kernels, as the backend calls them.
#pragma once

#include "backend.h"

namespace tilemoe::cuda {

void top_k(const tilemoe_top_k_args& args);
void route_top_k(const tilemoe_routing& routing, const tilemoe_route_top_k_args& args);
void route_general(const tilemoe_routing& routing, const tilemoe_route_general_args& args);
void route_grouped(const tilemoe_routing& routing, const tilemoe_route_grouped_args& args);

// Scratch of a routing from pairs, top-K or general.
size_t pair_scratch_bytes(const tilemoe_routing_spec& spec);

}  // namespace tilemoe::cuda
