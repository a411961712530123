// The sizes of a routing, which no backend owns: capacity, the layout of the object in the caller's
// memory, and the checks of the arguments that build one.
#pragma once

#include "tilemoe/tilemoe.h"

namespace tilemoe {

// Checks the spec and returns it, as this version knows it, with pairs and capacity filled in.
tilemoe_routing_spec complete(const tilemoe_routing_spec* spec);

// Bytes of the routing object's arrays. `spec` is complete.
size_t routing_bytes(const tilemoe_routing_spec& spec);

// Lays the arrays out in `memory`.
tilemoe_routing bind_routing(const tilemoe_routing_spec& spec, void* memory, size_t bytes);

// Fills a caller's struct.
void write_routing(const tilemoe_routing& routing, tilemoe_routing* to);

// The routing as this version knows it, `spec` complete. Throws unless it came from bind_routing.
tilemoe_routing read_routing(const tilemoe_routing* routing);

}  // namespace tilemoe
