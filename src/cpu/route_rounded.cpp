// Token rounding upwards: the tokens that did not choose an expert but weigh it most.

#include <algorithm>
#include <cstdint>

#include "cpu/choose.h"
#include "cpu/cpu_backend.h"
#include "cpu/matrix.h"
#include "cpu/native_fma.h"
#include "cpu/routing_scratch.h"
#include "cpu/thread_pool.h"
#include "routing/rounding.h"

namespace tilemoe::cpu {

// The `needed` first of the ranks offered, in tokens' order. When the buffer is full all but the
// first `needed` go, and from then on only what beats their last comes in: no column is sorted.
class FirstRanks {
 public:
  FirstRanks() = default;
  FirstRanks(uint64_t* buffer, int64_t size, int64_t needed)
      : buffer_(buffer),
        size_(size),
        needed_(needed),
        lowest_key_(needed > 0 ? INT32_MIN : kNone) {}

  // A key below this cannot be among the first.
  TILEMOE_HOST_DEVICE int32_t lowest_key() const { return lowest_key_; }

  void offer(int32_t key, int32_t token) {
    buffer_[count_++] = order::rank(key, token);
    if (count_ == size_ && count_ > needed_) sift();
  }

  // Their number is at most `needed`. In ascending order of token.
  int64_t finish() {
    if (count_ > needed_) sift();
    std::sort(buffer_, buffer_ + count_,
              [](uint64_t a, uint64_t b) { return order::rank_index(a) < order::rank_index(b); });
    return count_;
  }

 private:
  static constexpr int32_t kNone = INT32_MAX;  // no number has this key

  // Tokens come in ascending order, so one that equals the last kept loses to it.
  void sift() {
    std::nth_element(buffer_, buffer_ + needed_ - 1, buffer_ + count_);
    count_ = needed_;
    lowest_key_ = order::rank_key(buffer_[needed_ - 1]) + 1;
  }

  uint64_t* buffer_ = nullptr;
  int64_t size_ = 0, needed_ = 0, count_ = 0;
  int32_t lowest_key_ = kNone;
};

// Columns that one task reads together.
constexpr int kColumns = 8;

// Offers p(t, e) of tokens [begin, end) that did not choose e, for experts [e0, e0 + count).
template <class Logit>
TILEMOE_HOST_DEVICE void offer_columns(const tilemoe_tensor& logits, const TokenSoftmax* softmax,
                                       int64_t begin, int64_t end, int64_t e0, int count,
                                       FirstRanks (&first)[kColumns]) {
  for (int64_t t = begin; t < end; ++t) {
    const Logit* row = row_of<const Logit>(logits, t) + e0;
    const TokenSoftmax token = softmax[t];
    float x[kColumns] = {};
    int32_t keys[kColumns], offered[kColumns];
    if (count == kColumns)
      for (int c = 0; c < kColumns; ++c) x[c] = to_float(row[c]);
    else
      for (int c = 0; c < count; ++c) x[c] = to_float(row[c]);
    const auto first_id = static_cast<int32_t>(e0);
    int32_t any = 0;
    for (int c = 0; c < kColumns; ++c) {
      const int32_t logit_key = order::key(x[c]);
      const int32_t ties = (logit_key == token.last_key) & (first_id + c <= token.last_id);
      const int32_t chosen = (logit_key > token.last_key) | ties;
      keys[c] = order::key(order::softmax_weight(x[c], token.max) / token.sum);
      offered[c] = (keys[c] >= first[c].lowest_key()) & (chosen ^ 1);
      any |= offered[c];
    }
    if (any == 0) continue;
    for (int c = 0; c < count; ++c)
      if (offered[c]) first[c].offer(keys[c], static_cast<int32_t>(t));
  }
}

// Token rounding. By token: top-K and its softmax. By expert, for each group of tokens: count,
// round, keep the best of the chosen or add the best of the others, write the rows. By token again:
// list its rows.

namespace {

template <class Logit>
void choose_block(const tilemoe_tensor& logits, int64_t K, int64_t block,
                  const RoundScratch& scratch) {
  const int64_t E = logits.shape[1];
  int32_t nan_tokens = 0;
  with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
    for (int64_t t = scratch.tokens.begin(block); t < scratch.tokens.end(block); ++t) {
      const Logit* row = row_of<const Logit>(logits, t);
      int32_t* ids = scratch.ids + t * K;
      const bool any_nan =
          choose_and_score({TILEMOE_SOFTMAX_RENORMALIZED, E, K}, row, scratch.scores + t * K, ids);
      const float max = to_float(row[ids[0]]);
      const float sum = any_nan ? order::from_key(order::kNaNKey) : softmax_sum(row, E, max);
      scratch.softmax[t] = {max, sum, order::key(to_float(row[ids[K - 1]])), ids[K - 1]};
      nan_tokens += any_nan ? 1 : 0;
    }
  });
  scratch.nan_tokens[block] = nan_tokens;
}

// Sorts the chosen pairs by expert, as ranks of (score, pair).
void sort_chosen(const tilemoe_routing_spec& spec, const RoundScratch& scratch) {
  const SortScratch& sort = scratch.sort;
  parallel_for(sort.blocks.count, [&](int64_t b, int) {
    std::fill_n(sort.counts(b), spec.E, 0);
    for (int64_t pair = sort.blocks.begin(b); pair < sort.blocks.end(b); ++pair)
      ++sort.counts(b)[scratch.ids[pair]];
  });
  sort.scan(scratch.chosen_offsets);
  parallel_for(sort.blocks.count, [&](int64_t b, int) {
    for (int64_t pair = sort.blocks.begin(b); pair < sort.blocks.end(b); ++pair) {
      const int32_t place = sort.places(b)[scratch.ids[pair]]++;
      scratch.chosen[place] =
          order::rank(order::key(scratch.scores[pair]), static_cast<int32_t>(pair));
    }
  });
}

// f of every group: of an expert's chosen pairs, which ascend, each group's stand together.
void count_groups(const tilemoe_routing_spec& spec, const RoundScratch& scratch) {
  const int64_t groups = scratch.groups.count, pairs = scratch.groups.tokens * spec.K;
  const Blocks experts = Blocks::cut(spec.E, groups > 1 ? kColumns : spec.E, spec.E);
  parallel_for(experts.count, [&](int64_t block, int) {
    for (int64_t e = experts.begin(block); e < experts.end(block); ++e) {
      const int32_t end = scratch.chosen_offsets[e + 1];
      int32_t next = scratch.chosen_offsets[e];
      for (int64_t g = 0; g < groups; ++g) {
        const int32_t first = next;
        if (g + 1 == groups) next = end;
        while (next < end && order::rank_index(scratch.chosen[next]) < (g + 1) * pairs) ++next;
        scratch.counts[g * spec.E + e] = next - first;
      }
    }
  });
}

// f' of every group.
void round_groups(const tilemoe_route_rounded_args& args, const tilemoe_routing_spec& spec,
                  const RoundScratch& scratch) {
  const bool stochastic = spec.rounding == TILEMOE_ROUND_STOCHASTIC;
  const int64_t seed = stochastic ? *static_cast<const int64_t*>(args.seed.data) : 0;
  const int64_t step = stochastic ? *static_cast<const int64_t*>(args.step.data) : 0;
  const Blocks& blocks = scratch.group_blocks;
  parallel_for(blocks.count, [&](int64_t block, int) {
    int32_t dropped = 0;
    for (int64_t g = blocks.begin(block); g < blocks.end(block); ++g) {
      const int32_t* counts = scratch.counts + g * spec.E;
      int32_t* targets = scratch.targets + g * spec.E;
      rounding_targets(spec, counts, seed, step_of_group(step, scratch.groups.count, g),
                       scratch.expert_ranks + block * spec.E, targets);
      for (int64_t e = 0; e < spec.E; ++e) dropped += std::max(0, counts[e] - targets[e]);
    }
    scratch.dropped[block] = dropped;
  });
}

// The rows that each expert has room for, and the totals of all rows.
void fill_offsets(const tilemoe_route_rounded_args& args, const RoundScratch& scratch,
                  const tilemoe_routing& routing) {
  const tilemoe_routing_spec& spec = routing.spec;
  if (present(args.expert_counts))
    for (int64_t e = 0; e < spec.E; ++e)
      static_cast<int32_t*>(args.expert_counts.data)[e] =
          scratch.chosen_offsets[e + 1] - scratch.chosen_offsets[e];

  std::fill_n(routing.offsets, spec.E + 1, 0);
  for (int64_t g = 0; g < scratch.groups.count; ++g)
    for (int64_t e = 0; e < spec.E; ++e) routing.offsets[e + 1] += scratch.targets[g * spec.E + e];
  int64_t rows = 0, nan_tokens = 0;
  for (int64_t e = 0; e < spec.E; ++e) {
    rows += routing.offsets[e + 1];
    routing.offsets[e + 1] = static_cast<int32_t>(std::min(rows, spec.capacity));
  }
  for (int64_t b = 0; b < scratch.tokens.count; ++b) nan_tokens += scratch.nan_tokens[b];
  std::fill_n(routing.counters, TILEMOE_COUNTERS, 0);
  routing.counters[TILEMOE_COUNT_OVER_CAPACITY] = saturate(rows - routing.offsets[spec.E]);
  routing.counters[TILEMOE_COUNT_NAN_TOKENS] = saturate(nan_tokens);
  for (int64_t b = 0; b < scratch.group_blocks.count; ++b)
    routing.counters[TILEMOE_COUNT_DROPPED] += scratch.dropped[b];
}

// The chosen pairs that an expert keeps, in ascending order of pair; returns their number.
int64_t keep_best(uint64_t* chosen, int64_t count, int64_t target) {
  if (target >= count) return count;  // all, and they stand in that order already
  std::nth_element(chosen, chosen + target, chosen + count);
  std::sort(chosen, chosen + target,
            [](uint64_t a, uint64_t b) { return order::rank_index(a) < order::rank_index(b); });
  return target;
}

// Writes a group's rows of an expert in ascending order of token, as many as it has room for, from
// `row` on; returns the row after the last.
int32_t write_rows(int64_t e, int32_t row, const uint64_t* kept, int64_t kept_count,
                   const uint64_t* added, int64_t added_count, const RoundScratch& scratch,
                   const tilemoe_routing& routing) {
  const int64_t K = routing.spec.K;
  const int64_t end = std::min<int64_t>(routing.offsets[e + 1], row + kept_count + added_count);
  int64_t k = 0, a = 0;
  for (; row < end; ++row) {
    const int64_t pair = k < kept_count ? order::rank_index(kept[k]) : -1;
    const bool takes_kept =
        k < kept_count && (a == added_count || pair / K < order::rank_index(added[a]));
    const uint64_t rank = takes_kept ? kept[k++] : added[a++];
    routing.row_token[row] = takes_kept ? static_cast<int32_t>(pair / K) : order::rank_index(rank);
    routing.row_score[row] = order::from_key(order::rank_key(rank));
    scratch.row_pair[row] = takes_kept ? static_cast<int32_t>(pair) : -1;
  }
  return row;
}

// The rows of experts [e0, e0 + count), group by group.
template <class Logit>
void fill_experts(const tilemoe_tensor& logits, int64_t e0, int count, const RoundScratch& scratch,
                  const tilemoe_routing& routing) {
  const RoundGroups& groups = scratch.groups;
  uint64_t* chosen[kColumns];  // of the group
  int32_t row[kColumns];       // the next
  for (int c = 0; c < count; ++c) {
    chosen[c] = scratch.chosen + scratch.chosen_offsets[e0 + c];
    row[c] = routing.offsets[e0 + c];
  }
  for (int64_t g = 0; g < groups.count; ++g) {
    const int32_t* counts = scratch.counts + g * routing.spec.E + e0;
    const int32_t* targets = scratch.targets + g * routing.spec.E + e0;
    const auto candidates = [&](int c) {
      return scratch.candidates + (e0 + c) * scratch.candidates_each;
    };
    FirstRanks first[kColumns];
    bool any = false;
    for (int c = 0; c < count; ++c) {
      const int64_t needed = std::max(0, targets[c] - counts[c]);
      first[c] = FirstRanks(candidates(c), scratch.candidates_each, needed);
      any |= needed > 0;
    }
    if (any)
      with_native_fma([&]() TILEMOE_ALWAYS_INLINE {
        offer_columns<Logit>(logits, scratch.softmax, g * groups.tokens, (g + 1) * groups.tokens,
                             e0, count, first);
      });
    for (int c = 0; c < count; ++c) {
      const int64_t kept = keep_best(chosen[c], counts[c], targets[c]);
      const int64_t added = first[c].finish();
      row[c] = write_rows(e0 + c, row[c], chosen[c], kept, candidates(c), added, scratch, routing);
      chosen[c] += counts[c];
    }
  }
}

// visit(row) for the rows of tokens [begin, end), by expert: each expert's rows ascend by token.
template <class Visit>
void for_rows_of_tokens(const tilemoe_routing& routing, int64_t begin, int64_t end,
                        const Visit& visit) {
  for (int64_t e = 0; e < routing.spec.E; ++e) {
    const int32_t* last = routing.row_token + routing.offsets[e + 1];
    const int32_t* row = std::lower_bound(
        static_cast<const int32_t*>(routing.row_token + routing.offsets[e]), last, begin);
    for (; row < last && *row < end; ++row) visit(static_cast<int32_t>(row - routing.row_token));
  }
}

// token_offsets[t + 1] = number of token t's rows, for now; chosen_row.
void count_rows_of_tokens(int64_t begin, int64_t end, const RoundScratch& scratch,
                          const tilemoe_routing& routing) {
  const int64_t K = routing.spec.K;
  std::fill(scratch.chosen_row + begin * K, scratch.chosen_row + end * K, -1);
  std::fill(routing.token_offsets + begin + 1, routing.token_offsets + end + 1, 0);
  for_rows_of_tokens(routing, begin, end, [&](int32_t row) {
    ++routing.token_offsets[routing.row_token[row] + 1];
    if (scratch.row_pair[row] >= 0) scratch.chosen_row[scratch.row_pair[row]] = row;
  });
}

// A token's pairs: the kept of its K in their order, then the added ones by expert.
void list_rows_of_tokens(int64_t begin, int64_t end, const RoundScratch& scratch,
                         const tilemoe_routing& routing) {
  const int64_t K = routing.spec.K;
  for (int64_t t = begin; t < end; ++t) {
    int32_t slot = routing.token_offsets[t];
    for (int64_t pair = t * K; pair < (t + 1) * K; ++pair)
      if (scratch.chosen_row[pair] >= 0) routing.pair_row[slot++] = scratch.chosen_row[pair];
    scratch.next_slot[t] = slot;
  }
  for_rows_of_tokens(routing, begin, end, [&](int32_t row) {
    if (scratch.row_pair[row] < 0)
      routing.pair_row[scratch.next_slot[routing.row_token[row]]++] = row;
  });
}

void fill_pairs(const RoundScratch& scratch, const tilemoe_routing& routing) {
  constexpr int64_t kTokensPerBlock = 256;
  const int64_t T = routing.spec.T;
  const Blocks blocks = Blocks::cut(T, kTokensPerBlock, kMaxBlocks);
  parallel_for(blocks.count, [&](int64_t b, int) {
    count_rows_of_tokens(blocks.begin(b), blocks.end(b), scratch, routing);
  });
  routing.token_offsets[0] = 0;
  for (int64_t t = 0; t < T; ++t) routing.token_offsets[t + 1] += routing.token_offsets[t];
  parallel_for(blocks.count, [&](int64_t b, int) {
    list_rows_of_tokens(blocks.begin(b), blocks.end(b), scratch, routing);
  });
  std::fill(routing.pair_row + routing.token_offsets[T], routing.pair_row + routing.spec.pairs, -1);
}

}  // namespace

void route_rounded(const tilemoe_routing& routing, const tilemoe_route_rounded_args& args) {
  const tilemoe_routing_spec& spec = routing.spec;
  ScratchLayout layout(args.workspace);
  const RoundScratch scratch(spec, layout);
  with_float(args.logits.dtype, [&]<class Logit>() {
    parallel_for(scratch.tokens.count, [&](int64_t block, int) {
      choose_block<Logit>(args.logits, spec.K, block, scratch);
    });
    sort_chosen(spec, scratch);
    count_groups(spec, scratch);
    round_groups(args, spec, scratch);
    fill_offsets(args, scratch, routing);
    const Blocks experts = Blocks::cut(spec.E, kColumns, spec.E);
    parallel_for(experts.count, [&](int64_t group, int) {
      const int64_t e0 = experts.begin(group);
      fill_experts<Logit>(args.logits, e0, static_cast<int>(experts.end(group) - e0), scratch,
                          routing);
    });
  });
  fill_pairs(scratch, routing);
}

}  // namespace tilemoe::cpu
