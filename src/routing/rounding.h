// Token rounding: its random bits and its targets, the same on host and device.
//
// Philox 4x32-10, the counter-based generator of Salmon, Moraes, Dror and Shaw, "Parallel random
// numbers: as easy as 1, 2, 3" (SC 2011): 128 random bits from a counter and a key, no state.
#pragma once

#include <cstdint>

#include "core/numbers.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe {

struct PhiloxCounter {
  uint32_t word[4];
};
struct PhiloxKey {
  uint32_t word[2];
};

TILEMOE_HOST_DEVICE PhiloxCounter philox(PhiloxCounter counter, PhiloxKey key) {
  constexpr uint64_t kMultiplier0 = 0xD2511F53, kMultiplier1 = 0xCD9E8D57;
  constexpr uint32_t kWeyl0 = 0x9E3779B9, kWeyl1 = 0xBB67AE85;
  for (int round = 0; round < 10; ++round) {
    const uint64_t product0 = kMultiplier0 * counter.word[0];
    const uint64_t product1 = kMultiplier1 * counter.word[2];
    counter = {{static_cast<uint32_t>(product1 >> 32) ^ counter.word[1] ^ key.word[0],
                static_cast<uint32_t>(product1),
                static_cast<uint32_t>(product0 >> 32) ^ counter.word[3] ^ key.word[1],
                static_cast<uint32_t>(product0)}};
    key.word[0] += kWeyl0;
    key.word[1] += kWeyl1;
  }
  return counter;
}

// Token rounding's targets: how many rows f'_e expert e gets instead of the f_e that chose it.

// 32 random bits for expert e at a step: the key is the seed, the counter (step, e).
TILEMOE_HOST_DEVICE uint32_t rounding_bits(int64_t seed, int64_t step, int64_t e) {
  const auto low = [](int64_t x) { return static_cast<uint32_t>(x); };
  const auto high = [](int64_t x) { return static_cast<uint32_t>(static_cast<uint64_t>(x) >> 32); };
  const PhiloxCounter counter = {{low(step), high(step), low(e), high(e)}};
  return philox(counter, {{low(seed), high(seed)}}).word[0];
}

// Whether an expert's remainder f mod m is rounded up, for the rules that look at one expert alone.
// `bits` are the stochastic rule's: up with probability remainder / m, to 2^-32.
TILEMOE_HOST_DEVICE bool rounds_up(tilemoe_rounding rule, int64_t remainder, int64_t m,
                                   uint32_t bits) {
  switch (rule) {
    case TILEMOE_ROUND_NEAREST: return remainder > 0 && 2 * remainder >= m;
    case TILEMOE_ROUND_UP: return remainder > 0;
    case TILEMOE_ROUND_STOCHASTIC:
      return static_cast<uint64_t>(bits) * static_cast<uint64_t>(m) <
             static_cast<uint64_t>(remainder) << 32;
    case TILEMOE_ROUND_DOWN:
    case TILEMOE_ROUND_BALANCED: return false;
  }
  return false;
}

// f'_e: the multiple of m below f or above it, at most the largest one in T. Nothing is rounded if
// T < m or m is 1: f may then be of several groups of T tokens.
TILEMOE_HOST_DEVICE int32_t rounded_count(int64_t f, int64_t T, int64_t m, bool up) {
  if (T < m || m == 1) return static_cast<int32_t>(f);
  const int64_t target = f / m * m + (up ? m : 0);
  const int64_t limit = T / m * m;
  return static_cast<int32_t>(target < limit ? target : limit);
}

// Balanced: how many experts go up so that the sum of all f' is nearest to that of all f; a half
// goes up.
TILEMOE_HOST_DEVICE int64_t balanced_ups(int64_t sum_of_remainders, int64_t m) {
  return (2 * sum_of_remainders + m) / (2 * m);
}

TILEMOE_HOST_DEVICE int64_t tokens_rounded_together(const tilemoe_routing_spec& spec) {
  return spec.round_tokens > 0 ? spec.round_tokens : spec.T;
}

// The groups of tokens that are rounded separately. If nothing can be rounded, groups make no
// difference, and all tokens are one group.
struct RoundGroups {
  int64_t count;   // at least 1
  int64_t tokens;  // of a group

  explicit RoundGroups(const tilemoe_routing_spec& spec) : count(1), tokens(spec.T) {
    const int64_t together = tokens_rounded_together(spec);
    if (spec.T == 0 || together < spec.m || spec.m == 1) return;
    count = spec.T / together;
    tokens = together;
  }
};

// The step that a group's random bits are drawn with, modulo 2^64.
TILEMOE_HOST_DEVICE int64_t step_of_group(int64_t step, int64_t groups, int64_t group) {
  return static_cast<int64_t>(static_cast<uint64_t>(step) * static_cast<uint64_t>(groups) +
                              static_cast<uint64_t>(group));
}

// A group's f' (E) from its f (E) by the spec's rule. Balanced: the experts with the largest
// remainders go up, ties to the lower id; `ranks` (E) is scratch for their order. seed and step,
// the group's: stochastic only.
void rounding_targets(const tilemoe_routing_spec& spec, const int32_t* f, int64_t seed,
                      int64_t step, uint64_t* ranks, int32_t* targets);

}  // namespace tilemoe
