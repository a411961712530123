// Routing: how tokens, or pairs, are cut into tasks, and the scratch. Both depend on the problem
// alone, so results do not depend on the number of threads.
#pragma once

#include <algorithm>
#include <cstdint>
#include <limits>

#include "routing/rounding.h"
#include "routing/spec.h"
#include "tilemoe/tilemoe.h"

namespace tilemoe::cpu {

struct Blocks {
  int64_t items;  // tokens or pairs
  int64_t size;   // of a block; the last may be shorter
  int64_t count;

  // Blocks of at least `smallest` items, at most `most` of them.
  static Blocks cut(int64_t items, int64_t smallest, int64_t limit) {
    const int64_t size = std::max({smallest, (items + limit - 1) / limit, int64_t{1}});
    return {items, size, (items + size - 1) / size};
  }
  int64_t begin(int64_t block) const { return block * size; }
  int64_t end(int64_t block) const { return std::min(items, (block + 1) * size); }
};

// Elements of logits worth a task of their own: some tens of microseconds.
constexpr int64_t kLogitsPerTask = 16384;

// Tokens of E logits each, without a limit on the number of blocks.
inline Blocks token_blocks(int64_t T, int64_t E) {
  return Blocks::cut(T, std::max<int64_t>(1, kLogitsPerTask / E), std::max<int64_t>(1, T));
}

// ---- the scratch of a routing and of the router's backward, in the caller's workspace

constexpr int64_t kMaxBlocks = 64;  // if a block has its own array of E

inline int32_t saturate(int64_t count) {
  return static_cast<int32_t>(std::min<int64_t>(count, std::numeric_limits<int32_t>::max()));
}

// A counting sort of pairs by expert that keeps their order: blocks of pairs count, one scan gives
// each block its first place for every expert, the blocks place. No two blocks write the same
// place, so the threads do not matter.
struct SortScratch {
  Blocks blocks;
  int64_t E;
  int32_t* rows;  // (blocks + 1, E)

  SortScratch(int64_t pairs, int64_t experts, ScratchLayout& layout)
      : blocks(Blocks::cut(pairs, std::max(kPairsPerBlock, experts), kMaxBlocks)), E(experts) {
    rows = layout.take<int32_t>((blocks.count + 1) * E);
  }

  // Before the scan, a block's number of pairs by expert; they lie where the next block's places
  // will, so that the scan needs no memory of its own.
  int32_t* counts(int64_t block) const { return rows + (block + 1) * E; }
  // After the scan, a block's first place by expert.
  int32_t* places(int64_t block) const { return rows + block * E; }

  // Fills offsets (E + 1), expert e's pairs being [offsets[e], offsets[e + 1]), and the places.
  void scan(int32_t* offsets) const {
    int32_t* first = places(0);
    std::fill_n(first, E, 0);
    for (int64_t b = 0; b < blocks.count; ++b)
      for (int64_t e = 0; e < E; ++e) first[e] += counts(b)[e];
    offsets[0] = 0;
    for (int64_t e = 0; e < E; ++e) {
      offsets[e + 1] = offsets[e] + first[e];
      first[e] = offsets[e];
    }
    for (int64_t b = 0; b < blocks.count; ++b)
      for (int64_t e = 0; e < E; ++e) counts(b)[e] += places(b)[e];
  }

 private:
  static constexpr int64_t kPairsPerBlock = 4096;
};

// The results of one block of the caller's pairs, in addition to its counts.
struct PairBlock {
  int32_t token_before;  // general: the largest token in range before the block
  int32_t bad_ids;
  int32_t nan_tokens, first_nan_token, last_nan_token;  // tokens with a NaN score
};

// Routing from pairs.
struct PairScratch {
  SortScratch sort;
  PairBlock* blocks;  // (sort.blocks)

  PairScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout)
      : sort(spec.pairs, spec.E, layout) {
    blocks = layout.take<PairBlock>(sort.blocks.count);
  }
};

// A token's softmax, for its columns, and the last of its K.
struct TokenSoftmax {
  float max, sum;  // p(e) = softmax_weight(logit, max) / sum
  int32_t last_key, last_id;
};

// Token rounding.
struct RoundScratch {
  Blocks tokens;
  SortScratch sort;
  RoundGroups groups;
  Blocks group_blocks;      // of groups, whose targets are one task
  int32_t* ids;             // (T, K) each token's choice
  float* scores;            // (T, K)
  TokenSoftmax* softmax;    // (T)
  int32_t* nan_tokens;      // (tokens) of a block
  int32_t* chosen_offsets;  // (E + 1)
  uint64_t* chosen;         // (T * K) by expert: rank of (score, pair)
  int32_t* counts;          // (groups, E) f
  int32_t* targets;         // (groups, E) f'
  uint64_t* expert_ranks;   // (group_blocks, E)
  int32_t* dropped;         // (group_blocks) sum of f - f' where f is greater
  int64_t candidates_each;
  uint64_t* candidates;  // (E, candidates_each) ranks of (p, token) that a group may add
  int32_t* row_pair;     // (capacity) pair of a chosen row, -1 for an added one
  int32_t* chosen_row;   // (T, K) row of a pair, -1 if it is dropped
  int32_t* next_slot;    // (T)

  RoundScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout)
      : tokens(token_blocks(spec.T, spec.E)),
        sort(spec.T * spec.K, spec.E, layout),
        groups(spec),
        group_blocks(
            Blocks::cut(groups.count, std::max<int64_t>(1, kLogitsPerTask / spec.E), kMaxBlocks)) {
    const int64_t T = spec.T, E = spec.E, chosen_pairs = T * spec.K;
    ids = layout.take<int32_t>(chosen_pairs);
    scores = layout.take<float>(chosen_pairs);
    softmax = layout.take<TokenSoftmax>(T);
    nan_tokens = layout.take<int32_t>(tokens.count);
    chosen_offsets = layout.take<int32_t>(E + 1);
    chosen = layout.take<uint64_t>(chosen_pairs);
    const int64_t each_target = checked_product(groups.count, E, "groups * E");
    counts = layout.take<int32_t>(each_target);
    targets = layout.take<int32_t>(each_target);
    expert_ranks = layout.take<uint64_t>(group_blocks.count * E);
    dropped = layout.take<int32_t>(group_blocks.count);
    // Fewer than m are added; twice as many, and half of the work is done when they are sifted.
    const bool adds =
        spec.rounding != TILEMOE_ROUND_DOWN && tokens_rounded_together(spec) >= spec.m;
    candidates_each = adds ? std::min(groups.tokens, 2 * (spec.m - 1)) : 0;
    candidates = layout.take<uint64_t>(E * candidates_each);
    row_pair = layout.take<int32_t>(spec.capacity);
    chosen_row = layout.take<int32_t>(chosen_pairs);
    next_slot = layout.take<int32_t>(T);
  }
};

// The router's backward: a token's gradient in float32, and its choice, for every block of tokens.
struct BackwardScratch {
  Blocks tokens;
  float* gradient;  // (tokens, E)
  int32_t* ids;     // (tokens, K)
  float* scores;    // (tokens, K)
  float* ds;        // (tokens, K)

  BackwardScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout)
      : tokens(Blocks::cut(spec.T, std::max<int64_t>(1, kLogitsPerTask / spec.E), kMaxBlocks)) {
    gradient = layout.take<float>(tokens.count * spec.E);
    ids = layout.take<int32_t>(tokens.count * spec.K);
    scores = layout.take<float>(tokens.count * spec.K);
    ds = layout.take<float>(tokens.count * spec.K);
  }
};

}  // namespace tilemoe::cpu
