// The layout of a routing's memory: its arrays in order. tilemoe_routing_bind follows this table, and
// tilemoe_routing_layout and the PyTorch package's operator of that name return it.
#pragma once

#include <cstddef>
#include <iterator>

#include "tilemoe/tilemoe.h"

namespace tilemoe {

struct RoutingArray {
  tilemoe_routing_array array;
  unsigned kinds;  // of routings that have it, a bit each
  size_t field;    // of tilemoe_routing, in bytes

  constexpr bool is_in(tilemoe_routing_kind kind) const { return kinds >> kind & 1; }
};

namespace routing_kinds {
constexpr unsigned kGeneral = 1u << TILEMOE_ROUTING_GENERAL;
constexpr unsigned kRounded = 1u << TILEMOE_ROUTING_ROUNDED;
constexpr unsigned kGrouped = 1u << TILEMOE_ROUTING_GROUPED;
}  // namespace routing_kinds

#define ARRAY(name, size, more, kinds) \
  { {#name, TILEMOE_ROUTING_SIZE_##size, more}, kinds, offsetof(tilemoe_routing, name) }
// The counters are last: their place shows whether the spec is still the one that was bound.
constexpr RoutingArray kRoutingArrays[] = {
    ARRAY(offsets, E, 1, ~0u),
    ARRAY(row_score, CAPACITY, 0, ~0u),
    ARRAY(row_token, CAPACITY, 0, ~routing_kinds::kGrouped),
    ARRAY(pair_row, PAIRS, 0, ~routing_kinds::kGrouped),
    ARRAY(token_offsets, T, 1, routing_kinds::kGeneral | routing_kinds::kRounded),
    ARRAY(counters, 0, TILEMOE_COUNTERS, ~0u),
};
#undef ARRAY
static_assert(std::size(kRoutingArrays) == TILEMOE_ROUTING_ARRAYS);

}  // namespace tilemoe
