// A token's choice among the experts of its best groups: the others rank last, as NaN does.
#pragma once

#include <algorithm>
#include <cstdint>

#include "cpu/choose_experts.h"
#include "routing/groups.h"

namespace tilemoe::cpu {

struct GroupLimit {
  int64_t n_group = 1, topk_group = 1;
  tilemoe_group_score score = TILEMOE_GROUP_MAX;
};

// visit(l, group) for each expert begin + l of a chunk.
template <class Visit>
TILEMOE_HOST_DEVICE void each_group(int64_t begin, int count, int64_t size, const Visit& visit) {
  int64_t group = begin / size, left = size - begin % size;
  for (int l = 0; l < count; ++l) {
    visit(l, group);
    if (--left == 0) ++group, left = size;
  }
}

// A bit for each of a row's best groups.
template <class Logit, class RankBy>
TILEMOE_HOST_DEVICE uint32_t best_groups(const Logit* row, int64_t E, const RankBy& rank_by,
                                         const GroupLimit& limit) {
  order::TopTwo worth[kMaxGroups];
  for (int64_t begin = 0; begin < E; begin += kChunk) {
    float x[kChunk];
    const int count = load_chunk(row, begin, E, x);
    rank_by.apply(x, begin, count);
    each_group(begin, count, E / limit.n_group,
               [&](int l, int64_t group) { worth[group].add(x[l]); });
  }
  int32_t keys[kMaxGroups];
  const auto groups = static_cast<int32_t>(limit.n_group);
  for (int32_t g = 0; g < groups; ++g) keys[g] = worth[g].key_of(limit.score);
  uint32_t best = 0;
  for (int32_t g = 0; g < groups; ++g) {
    int32_t before = 0;
    for (int32_t other = 0; other < groups; ++other)
      before += order::group_before(keys[other], other, keys[g], g) ? 1 : 0;
    if (before < limit.topk_group) best |= 1u << g;
  }
  return best;
}

template <class RankBy>
struct RankInGroups {
  RankBy rank_by;
  int64_t size;  // experts of a group
  uint32_t groups;

  TILEMOE_HOST_DEVICE void apply(float (&x)[kChunk], int64_t begin, int count) const {
    rank_by.apply(x, begin, count);
    each_group(begin, count, size, [&](int l, int64_t group) {
      if ((groups >> group & 1) == 0) x[l] = order::from_key(order::kNaNKey);
    });
  }
};

// As choose(), among the experts of the best groups.
template <class Logit, class Id, class RankBy>
TILEMOE_HOST_DEVICE bool choose_in_groups(const Logit* row, int64_t E, int64_t K,
                                          const RankBy& rank_by, const GroupLimit& limit,
                                          float* values, Id* ids) {
  if (limit.n_group == 1) return choose(row, E, K, rank_by, values, ids);
  const uint32_t groups = best_groups(row, E, rank_by, limit);
  const RankInGroups<RankBy> within{rank_by, E / limit.n_group, groups};
  return choose(row, E, K, within, values, ids);
}

}  // namespace tilemoe::cpu
