#include "case.h"

#include <numeric>

namespace tilemoe::verify {

int64_t Case::outer_rows() const {
  if (routing != RoutingKind::kGrouped) return T;
  return std::accumulate(counts.begin(), counts.end(), spare_rows);
}

RoutingSpec Case::spec(int64_t pairs, Device device) const {
  RoutingSpec result = RoutingSpec::grouped(device, outer_rows(), E);
  switch (routing) {
    case RoutingKind::kTopK: result = RoutingSpec::top_k(device, T, E, K); break;
    case RoutingKind::kGeneral: result = RoutingSpec::general(device, T, E, pairs); break;
    case RoutingKind::kRounded: result = RoutingSpec::rounded(device, T, E, K, rounding, m); break;
    case RoutingKind::kGrouped: break;
  }
  if (capacity != 0) result.capacity = capacity;
  return result;
}

Experts Case::experts(Device device) const {
  return {.device = device,
          .dtype = dtype,
          .d = d,
          .n = n,
          .E = E,
          .activation = activation,
          .gate_layout = gate_layout,
          .clamp = clamp,
          .alpha = alpha,
          .up_shift = up_shift,
          .column_blocks = column_blocks,
          .rank_1 = lora.rank_1(),
          .rank_2 = lora.rank_2(),
          .format_1 = format_1,
          .format_2 = format_2,
          .weight_blocks = weight_blocks,
          .recipe = recipe,
          .float_scales = float_scales,
          .format_H = format_H};
}

}  // namespace tilemoe::verify
