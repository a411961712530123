#include "routing/rounding.h"

#include <algorithm>

#include "routing/order.h"

namespace tilemoe {
namespace {

void balanced_targets(const tilemoe_routing_spec& spec, const int32_t* f, uint64_t* ranks,
                      int32_t* targets) {
  const int64_t tokens = tokens_rounded_together(spec);
  int64_t remainders = 0;
  for (int64_t e = 0; e < spec.E; ++e) {
    const auto remainder = static_cast<int32_t>(f[e] % spec.m);
    remainders += remainder;
    ranks[e] = order::rank(remainder, static_cast<int32_t>(e));
    targets[e] = rounded_count(f[e], tokens, spec.m, false);
  }
  const int64_t ups = balanced_ups(remainders, spec.m);
  std::nth_element(ranks, ranks + ups, ranks + spec.E);
  for (int64_t i = 0; i < ups; ++i) {
    const int32_t e = order::rank_index(ranks[i]);
    targets[e] = rounded_count(f[e], tokens, spec.m, true);
  }
}

}  // namespace

void rounding_targets(const tilemoe_routing_spec& spec, const int32_t* f, int64_t seed,
                      int64_t step, uint64_t* ranks, int32_t* targets) {
  if (spec.rounding == TILEMOE_ROUND_BALANCED) {
    balanced_targets(spec, f, ranks, targets);
    return;
  }
  const int64_t tokens = tokens_rounded_together(spec);
  const bool stochastic = spec.rounding == TILEMOE_ROUND_STOCHASTIC;
  for (int64_t e = 0; e < spec.E; ++e) {
    const uint32_t bits = stochastic ? rounding_bits(seed, step, e) : 0;
    const bool up = rounds_up(spec.rounding, f[e] % spec.m, spec.m, bits);
    targets[e] = rounded_count(f[e], tokens, spec.m, up);
  }
}

}  // namespace tilemoe
