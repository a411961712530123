#include "routing/spec.h"

#include <algorithm>
#include <cstddef>
#include <cstring>

#include "core/check.h"
#include "routing/rounding.h"
#include "routing/routing_layout.h"

namespace tilemoe {
namespace {

using namespace limits;

// For a group of S tokens: S*K plus the most that rounding may add, and at most every token in
// every expert.
int64_t rounded_capacity(const tilemoe_routing_spec& spec) {
  if (spec.T == 0) return 0;
  const int64_t tokens = tokens_rounded_together(spec);
  const int64_t chosen = checked_product(tokens, spec.K, "T * K");
  int64_t added = 0;
  switch (spec.rounding) {
    case TILEMOE_ROUND_NEAREST: added = checked_product(spec.E, spec.m / 2, "E * m"); break;
    case TILEMOE_ROUND_UP:
    case TILEMOE_ROUND_STOCHASTIC: added = checked_product(spec.E, spec.m - 1, "E * m"); break;
    case TILEMOE_ROUND_DOWN: added = 0; break;
    case TILEMOE_ROUND_BALANCED: added = spec.m; break;
  }
  const int64_t rows = std::min(chosen + added, checked_product(tokens, spec.E, "T * E"));
  return checked_product(spec.T / tokens, rows, "rows of all groups");
}

int64_t row_bound(const tilemoe_routing_spec& spec) {
  switch (spec.kind) {
    case TILEMOE_ROUTING_TOP_K: return checked_product(spec.T, spec.K, "T * K");
    case TILEMOE_ROUTING_GENERAL: return spec.pairs;
    case TILEMOE_ROUTING_ROUNDED: return rounded_capacity(spec);
    case TILEMOE_ROUTING_GROUPED: return spec.capacity;
  }
  return 0;
}

bool grouped(const tilemoe_routing_spec& spec) {
  return spec.kind == TILEMOE_ROUTING_GROUPED;
}
int64_t elements(const tilemoe_routing_array& array, const tilemoe_routing_spec& spec) {
  switch (array.size) {
    case TILEMOE_ROUTING_SIZE_0: return array.more;
    case TILEMOE_ROUTING_SIZE_T: return spec.T + array.more;
    case TILEMOE_ROUTING_SIZE_E: return spec.E + array.more;
    case TILEMOE_ROUTING_SIZE_PAIRS: return spec.pairs + array.more;
    case TILEMOE_ROUTING_SIZE_CAPACITY: return spec.capacity + array.more;
  }
  return 0;
}

// Lays the arrays out from `base` on; null: for their size alone. `end`: bytes of all of them.
tilemoe_routing lay_out(const tilemoe_routing_spec& spec, char* base, size_t* end = nullptr) {
  tilemoe_routing routing{};
  routing.struct_size = sizeof routing;
  routing.spec = spec;
  size_t used = 0;
  for (const RoutingArray& of : kRoutingArrays) {
    if (!of.is_in(spec.kind)) continue;
    void* const place = base ? base + used : nullptr;
    std::memcpy(reinterpret_cast<char*>(&routing) + of.field, &place, sizeof place);
    used += round_up(static_cast<size_t>(elements(of.array, spec)) * sizeof(int32_t), kAlignment);
  }
  if (end != nullptr) *end = used;
  return routing;
}

void check_kind(tilemoe_routing_kind kind) {
  TILEMOE_CHECK(kind >= TILEMOE_ROUTING_TOP_K && kind <= TILEMOE_ROUTING_GROUPED,
                "routing kind is " << static_cast<int>(kind) << ", expected a value in [0, 3]");
}

}  // namespace

int32_t routing_layout(tilemoe_routing_kind kind, tilemoe_routing_array* arrays) {
  check_kind(kind);
  int32_t count = 0;
  for (const RoutingArray& of : kRoutingArrays)
    if (of.is_in(kind)) arrays[count++] = of.array;
  return count;
}

tilemoe_routing_spec complete(const tilemoe_routing_spec* given) {
  tilemoe_routing_spec spec = read_struct("routing spec", given);
  check_reserved("routing spec", spec.reserved);
  TILEMOE_CHECK(spec.device == TILEMOE_CPU || spec.device == TILEMOE_CUDA,
                "device is " << static_cast<int>(spec.device) << ", expected cpu (0) or cuda (1)");
  check_kind(spec.kind);
  const int64_t limit = max_rows(spec.device);
  TILEMOE_CHECK(spec.T >= 0 && spec.T <= limit,
                "T is " << spec.T << ", expected a value in [0, " << limit << "]");
  TILEMOE_CHECK(spec.E >= 1 && spec.E <= kMaxExperts,
                "E is " << spec.E << ", expected a value in [1, " << kMaxExperts << "]");
  TILEMOE_CHECK(spec.pairs >= 0, "pairs is " << spec.pairs << ", expected at least 0");
  TILEMOE_CHECK(spec.capacity >= 0 && spec.capacity <= limit,
                "capacity is " << spec.capacity << ", expected a value in [0, " << limit << "]");
  const bool chooses = spec.kind == TILEMOE_ROUTING_TOP_K || spec.kind == TILEMOE_ROUTING_ROUNDED;
  if (chooses) {
    TILEMOE_CHECK(spec.K >= 1 && spec.K <= spec.E,
                  "K is " << spec.K << ", expected a value in [1, E = " << spec.E << "]");
    TILEMOE_CHECK(checked_product(spec.T, spec.K, "T * K") <= limit,
                  "T * K is " << spec.T << " * " << spec.K << ", expected at most " << limit);
  }
  if (spec.kind == TILEMOE_ROUTING_ROUNDED) {
    TILEMOE_CHECK(spec.m >= 1 && spec.m <= kMaxMultiple,
                  "m is " << spec.m << ", expected a value in [1, " << kMaxMultiple << "]");
    TILEMOE_CHECK(
        spec.rounding >= TILEMOE_ROUND_NEAREST && spec.rounding <= TILEMOE_ROUND_BALANCED,
        "rounding is " << static_cast<int>(spec.rounding) << ", expected a value in [0, 4]");
    TILEMOE_CHECK(
        spec.round_tokens == 0 || (spec.round_tokens > 0 && spec.T % spec.round_tokens == 0),
        "round_tokens is " << spec.round_tokens << ", expected 0 or a divisor of T = " << spec.T);
  } else {
    TILEMOE_CHECK(spec.round_tokens == 0,
                  "round_tokens is " << spec.round_tokens << ", expected 0 without token rounding");
  }
  if (grouped(spec))
    TILEMOE_CHECK(spec.T == 0, "T is " << spec.T << ", expected 0 with grouped routing");

  if (spec.capacity == 0) spec.capacity = row_bound(spec);
  if (spec.kind == TILEMOE_ROUTING_TOP_K) spec.pairs = spec.T * spec.K;
  if (spec.kind == TILEMOE_ROUTING_ROUNDED || grouped(spec)) spec.pairs = spec.capacity;
  TILEMOE_CHECK(spec.pairs <= limit && spec.capacity <= limit,
                "the routing has " << spec.pairs << " pairs and " << spec.capacity
                                   << " rows, expected at most " << limit);
  return spec;
}

size_t routing_bytes(const tilemoe_routing_spec& spec) {
  size_t bytes = 0;
  lay_out(spec, nullptr, &bytes);
  return bytes;
}

tilemoe_routing bind_routing(const tilemoe_routing_spec& spec, void* memory, size_t bytes) {
  const size_t needed = routing_bytes(spec);
  TILEMOE_CHECK(memory != nullptr, "the routing's memory is null, expected " << needed << " bytes");
  TILEMOE_CHECK(
      reinterpret_cast<uintptr_t>(memory) % kAlignment == 0,
      "the routing's memory " << memory << " is not aligned to " << kAlignment << " bytes");
  TILEMOE_CHECK(bytes >= needed,
                "the routing's memory has " << bytes << " bytes, expected at least " << needed);
  return lay_out(spec, static_cast<char*>(memory));
}

namespace {

// The bytes that a struct of `size` bytes has for the spec at its end.
uint64_t spec_bytes(uint64_t size) {
  return size - offsetof(tilemoe_routing, spec);
}

}  // namespace

void write_routing(const tilemoe_routing& routing, tilemoe_routing* to) {
  // An older caller's routing has no room for the end of a newer spec, so a later call could not
  // know the requested rounding.
  if (to != nullptr && to->struct_size < sizeof routing)
    TILEMOE_CHECK(routing.spec.round_tokens == 0,
                  "routing.struct_size is " << to->struct_size
                                            << ", too small for a spec with round_tokens: set it "
                                               "to sizeof the struct");
  write_struct("routing", to, routing);
  to->spec.struct_size = spec_bytes(to->struct_size);
}

tilemoe_routing read_routing(const tilemoe_routing* given) {
  tilemoe_routing routing = read_struct("routing", given);
  TILEMOE_CHECK(routing.spec.struct_size == spec_bytes(given->struct_size),
                "routing.spec.struct_size is "
                    << routing.spec.struct_size << ", expected " << spec_bytes(given->struct_size)
                    << ": the routing did not come from tilemoe_routing_bind");
  routing.spec.struct_size = sizeof routing.spec;
  for (const void* reserved : routing.reserved)
    TILEMOE_CHECK(reserved == nullptr, "routing.reserved is " << reserved << ", expected null");
  const tilemoe_routing_spec spec = complete(&routing.spec);
  TILEMOE_CHECK(spec.capacity == routing.spec.capacity && spec.pairs == routing.spec.pairs,
                "the routing's spec was changed after tilemoe_routing_bind");
  const auto address = reinterpret_cast<uintptr_t>(routing.offsets);
  TILEMOE_CHECK(address != 0 && address % limits::kAlignment == 0,
                "the routing's offsets are at " << routing.offsets
                                                << ": it did not come from tilemoe_routing_bind");
  const tilemoe_routing bound = lay_out(spec, reinterpret_cast<char*>(routing.offsets));
  TILEMOE_CHECK(routing.counters == bound.counters && routing.row_score == bound.row_score &&
                    routing.row_token == bound.row_token && routing.pair_row == bound.pair_row &&
                    routing.token_offsets == bound.token_offsets,
                "the routing's arrays are not those of tilemoe_routing_bind for its spec");
  return routing;
}

}  // namespace tilemoe
