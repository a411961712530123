// Routing from pairs: they are sorted by expert and keep their order, so row r of an expert is the
// r-th pair with this expert. Pairs past the capacity are the highest expert's last ones.
#include <limits>

#include "cpu/cpu_backend.h"
#include "cpu/matrix.h"
#include "cpu/routing_scratch.h"
#include "cpu/thread_pool.h"

namespace tilemoe::cpu {
namespace {

constexpr int64_t kSkipped = -1;

// Pairs of a top-K routing: K per token.
template <class Id, class Score>
struct TopKPairs {
  const Id* ids;
  const Score* scores;
  int64_t K, E;

  // visit(pair, token, expert or kSkipped)
  template <class Visit>
  void walk(int64_t begin, int64_t end, int32_t /*token_before*/, const Visit& visit) const {
    int64_t token = begin / K, k = begin % K;
    for (int64_t pair = begin; pair < end; ++pair) {
      const auto id = static_cast<int64_t>(ids[pair]);
      visit(pair, static_cast<int32_t>(token), id >= 0 && id < E ? id : kSkipped);
      if (++k == K) k = 0, ++token;
    }
  }
};

// The caller's triples. `last_token` is the largest token in range before a pair, -1 before any.
template <class TokenId, class Id, class Score>
struct Triples {
  const TokenId* tokens;
  const Id* ids;
  const Score* scores;
  int64_t T, E;

  int32_t largest_token(int64_t begin, int64_t end) const {
    int32_t largest = -1;
    for (int64_t pair = begin; pair < end; ++pair)
      if (const auto token = static_cast<int64_t>(tokens[pair]); token > largest && token < T)
        largest = static_cast<int32_t>(token);
    return largest;
  }

  template <class Visit>
  void walk(int64_t begin, int64_t end, int32_t last_token, const Visit& visit) const {
    for (int64_t pair = begin; pair < end; ++pair) {
      const auto token = static_cast<int64_t>(tokens[pair]);
      const bool in_order = token >= 0 && token < T && token >= last_token;
      if (in_order) last_token = static_cast<int32_t>(token);
      const auto id = static_cast<int64_t>(ids[pair]);
      visit(pair, last_token, in_order && id >= 0 && id < E ? id : kSkipped);
    }
  }
};

template <class Pairs>
void count_block(const Pairs& pairs, int64_t begin, int64_t end, int64_t E, int32_t* counts,
                 PairBlock& block) {
  std::fill_n(counts, E, 0);
  block.bad_ids = block.nan_tokens = 0;
  block.first_nan_token = block.last_nan_token = -1;
  pairs.walk(begin, end, block.token_before, [&](int64_t pair, int32_t token, int64_t expert) {
    if (expert == kSkipped) {
      ++block.bad_ids;
      return;
    }
    ++counts[expert];
    const float score = to_float(pairs.scores[pair]);
    if (score == score || token == block.last_nan_token) return;
    if (block.nan_tokens++ == 0) block.first_nan_token = token;
    block.last_nan_token = token;
  });
}

template <class Pairs>
void place_block(const Pairs& pairs, int64_t begin, int64_t end, int32_t token_before,
                 int32_t* next_row, const tilemoe_routing& routing) {
  pairs.walk(begin, end, token_before, [&](int64_t pair, int32_t token, int64_t expert) {
    const int32_t row = expert == kSkipped ? -1 : next_row[expert]++;
    const bool fits = row >= 0 && row < routing.spec.capacity;
    routing.pair_row[pair] = fits ? row : -1;
    if (!fits) return;
    routing.row_token[row] = token;
    routing.row_score[row] = to_float(pairs.scores[pair]);
  });
}

void fill_counters(const PairScratch& scratch, int64_t over_capacity, int32_t* counters) {
  int64_t bad_ids = 0, nan_tokens = 0;
  int32_t last_nan_token = -1;
  for (int64_t b = 0; b < scratch.sort.blocks.count; ++b) {
    const PairBlock& block = scratch.blocks[b];
    bad_ids += block.bad_ids;
    nan_tokens += block.nan_tokens;
    if (block.nan_tokens == 0) continue;
    if (block.first_nan_token == last_nan_token) --nan_tokens;  // cut by the blocks' border
    last_nan_token = block.last_nan_token;
  }
  std::fill_n(counters, TILEMOE_COUNTERS, 0);
  counters[TILEMOE_COUNT_OVER_CAPACITY] = saturate(over_capacity);
  counters[TILEMOE_COUNT_BAD_IDS] = saturate(bad_ids);
  counters[TILEMOE_COUNT_NAN_TOKENS] = saturate(nan_tokens);
}

template <class Pairs>
void sort_pairs(const Pairs& pairs, const PairScratch& scratch, const tilemoe_routing& routing) {
  const SortScratch& sort = scratch.sort;
  const Blocks& blocks = sort.blocks;
  const int64_t E = routing.spec.E;
  parallel_for(blocks.count, [&](int64_t b, int) {
    count_block(pairs, blocks.begin(b), blocks.end(b), E, sort.counts(b), scratch.blocks[b]);
  });
  sort.scan(routing.offsets);
  const int32_t total = routing.offsets[E], capacity = saturate(routing.spec.capacity);
  for (int64_t e = 0; e <= E; ++e) routing.offsets[e] = std::min(routing.offsets[e], capacity);
  fill_counters(scratch, total - routing.offsets[E], routing.counters);
  parallel_for(blocks.count, [&](int64_t b, int) {
    place_block(pairs, blocks.begin(b), blocks.end(b), scratch.blocks[b].token_before,
                sort.places(b), routing);
  });
}

// Gives every block the largest token before it.
template <class Pairs>
void find_tokens_before(const Pairs& pairs, const PairScratch& scratch) {
  const Blocks& blocks = scratch.sort.blocks;
  parallel_for(blocks.count, [&](int64_t b, int) {
    scratch.blocks[b].token_before = pairs.largest_token(blocks.begin(b), blocks.end(b));
  });
  int32_t before = -1;
  for (int64_t b = 0; b < blocks.count; ++b) {
    const int32_t largest = std::max(before, scratch.blocks[b].token_before);
    scratch.blocks[b].token_before = before;
    before = largest;
  }
}

// A token's range starts at the first pair that reaches it; skipped pairs fall to the token before.
template <class Pairs>
void fill_token_offsets(const Pairs& pairs, const PairScratch& scratch,
                        const tilemoe_routing& routing) {
  const Blocks& blocks = scratch.sort.blocks;
  const int64_t T = routing.spec.T, count = routing.spec.pairs;
  int32_t* offsets = routing.token_offsets;
  parallel_for(blocks.count, [&](int64_t b, int) {
    int32_t reached = scratch.blocks[b].token_before;
    pairs.walk(blocks.begin(b), blocks.end(b), reached, [&](int64_t pair, int32_t token, int64_t) {
      while (reached < token) offsets[++reached] = static_cast<int32_t>(pair);
    });
    if (b + 1 == blocks.count)
      while (reached < T) offsets[++reached] = static_cast<int32_t>(count);
  });
  if (count == 0) std::fill_n(offsets, T + 1, 0);
}

}  // namespace

void route_top_k(const tilemoe_routing& routing, const tilemoe_route_top_k_args& args) {
  ScratchLayout layout(args.workspace);
  const PairScratch scratch(routing.spec, layout);
  for (int64_t b = 0; b < scratch.sort.blocks.count; ++b) scratch.blocks[b].token_before = -1;
  with_integer(args.ids.dtype, [&]<class Id>() {
    with_float(args.scores.dtype, [&]<class Score>() {
      const TopKPairs<Id, Score> pairs{static_cast<const Id*>(args.ids.data),
                                       static_cast<const Score*>(args.scores.data), routing.spec.K,
                                       routing.spec.E};
      sort_pairs(pairs, scratch, routing);
    });
  });
}

void route_general(const tilemoe_routing& routing, const tilemoe_route_general_args& args) {
  ScratchLayout layout(args.workspace);
  const PairScratch scratch(routing.spec, layout);
  with_integer(args.tokens.dtype, [&]<class TokenId>() {
    with_integer(args.experts.dtype, [&]<class Id>() {
      with_float(args.scores.dtype, [&]<class Score>() {
        const Triples<TokenId, Id, Score> pairs{static_cast<const TokenId*>(args.tokens.data),
                                                static_cast<const Id*>(args.experts.data),
                                                static_cast<const Score*>(args.scores.data),
                                                routing.spec.T, routing.spec.E};
        find_tokens_before(pairs, scratch);
        sort_pairs(pairs, scratch, routing);
        fill_token_offsets(pairs, scratch, routing);
      });
    });
  });
}

void route_grouped(const tilemoe_routing& routing, const tilemoe_route_grouped_args& args) {
  const int64_t E = routing.spec.E, capacity = routing.spec.capacity;
  int64_t total = 0, over = 0;  // rows that fit, and those that do not
  with_integer(args.counts.dtype, [&]<class Count>() {
    const auto* counts = static_cast<const Count*>(args.counts.data);
    routing.offsets[0] = 0;
    for (int64_t e = 0; e < E; ++e) {
      const int64_t count = std::max<int64_t>(0, counts[e]);
      const int64_t fits = std::min(count, capacity - total);
      total += fits;
      over += std::min<int64_t>(count - fits, std::numeric_limits<int32_t>::max());
      routing.offsets[e + 1] = static_cast<int32_t>(total);
    }
  });
  std::fill_n(routing.counters, TILEMOE_COUNTERS, 0);
  routing.counters[TILEMOE_COUNT_OVER_CAPACITY] = saturate(over);
  if (present(args.scores))
    std::copy_n(static_cast<const float*>(args.scores.data), total, routing.row_score);
  else
    std::fill_n(routing.row_score, total, 1.f);
}

}  // namespace tilemoe::cpu
