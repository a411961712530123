#include "case.h"

#include <numeric>

namespace tilemoe::verify {

int64_t Case::outer_rows() const {
  if (routing != RoutingKind::kGrouped) return T;
  return std::accumulate(counts.begin(), counts.end(), spare_rows);
}

RoutingSpec Case::spec(int64_t pairs, Device device) const {
  RoutingSpec result = RoutingSpec::grouped(outer_rows(), E, device);
  switch (routing) {
    case RoutingKind::kTopK: result = RoutingSpec::top_k(T, E, K, device); break;
    case RoutingKind::kGeneral: result = RoutingSpec::general(T, E, pairs, device); break;
    case RoutingKind::kRounded: result = RoutingSpec::rounded(T, E, K, rounding, m, device); break;
    case RoutingKind::kGrouped: break;
  }
  if (capacity != 0) result.capacity = capacity;
  return result;
}

Experts Case::experts(Device device) const {
  Experts result(d, n, E, dtype, activation, gate_layout, device);
  result.clamp = clamp, result.alpha = alpha, result.up_shift = up_shift;
  result.column_blocks = column_blocks;
  return result;
}

}  // namespace tilemoe::verify
