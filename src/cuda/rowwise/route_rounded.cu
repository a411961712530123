// Token rounding. By token: its choice and every expert's weight, stored by expert
// (weigh_tokens.cu). A block a group of tokens: f'. By expert and group: a threshold instead of a
// sort, then the rows in order of tokens and masks of the tokens they are for. By token again: the
// rows it has, read off the masks. Of several groups one launch more adds up what each expert has
// in those before.
#include "check.h"
#include "cuda/core/early_launch.h"
#include "cuda/rowwise/block_scan.h"
#include "cuda/rowwise/round_scratch.h"
#include "cuda/rowwise/routing.h"
#include "cuda/rowwise/select.h"
#include "routing/rounding.h"

namespace tilemoe::cuda {
namespace {

struct RoundParams {
  tilemoe_routing routing;
  const int64_t* seed;
  const int64_t* step;
  int32_t* expert_counts;  // (E) or null
  RoundScratch scratch;
};

// Bits of a digit where a block selects, and so its threads: 1024 where few blocks have much to do,
// 256 where many have little. By reasoning: groups of tokens were not measured yet.
constexpr int kMuchBits = 10, kLittleBits = 8;

// ------------------------------------------------------------ what is told of all rows

// Called by all threads of one block: rows_of(e), of an expert before capacity, is called by one of
// them, and then dropped() by each, whose sum is that of the dropped pairs.
template <int kThreads, class RowsOf, class Dropped>
__device__ void fill_offsets(const RoundParams& params, const RowsOf& rows_of,
                             const Dropped& dropped) {
  using Scan = BlockScan<int64_t, Add, kThreads>;
  __shared__ typename Scan::Shared scan;
  const tilemoe_routing& routing = params.routing;
  const tilemoe_routing_spec& spec = routing.spec;
  int64_t rows = 0;
  for (int64_t e0 = 0; e0 < spec.E; e0 += kThreads) {
    const int64_t e = e0 + threadIdx.x;
    const int32_t mine = e < spec.E ? rows_of(e) : 0;
    const typename Scan::Result sum = Scan::scan(scan, mine);
    if (e < spec.E)
      routing.offsets[e] = static_cast<int32_t>(min(rows + sum.inclusive - mine, spec.capacity));
    rows += sum.total;
  }
  int64_t nan_tokens = 0;
  for (int64_t w = threadIdx.x; w < params.scratch.words; w += kThreads)
    nan_tokens += params.scratch.nan_tokens[w];
  // Both are below 2^31: one scan adds them.
  const int64_t both = Scan::scan(scan, (int64_t{dropped()} << 32) + nan_tokens).total;
  if (threadIdx.x != 0) return;
  const int64_t fits = min(rows, spec.capacity);
  routing.offsets[spec.E] = static_cast<int32_t>(fits);
  for (int i = 0; i < TILEMOE_COUNTERS; ++i) routing.counters[i] = 0;
  routing.counters[TILEMOE_COUNT_OVER_CAPACITY] =
      static_cast<int32_t>(min(rows - fits, int64_t{INT32_MAX}));
  routing.counters[TILEMOE_COUNT_NAN_TOKENS] = static_cast<int32_t>(both);
  routing.counters[TILEMOE_COUNT_DROPPED] = static_cast<int32_t>(both >> 32);
}

// ------------------------------------------------------------ f', a block a group

// Balanced: the experts with a remainder above the threshold's go up, and those with its own up to
// an id.
struct BalancedUps {
  int32_t remainder = INT32_MAX;
  int64_t last_id = -1;

  __device__ bool goes_up(int32_t expert_remainder, int64_t e) const {
    return expert_remainder > remainder || (expert_remainder == remainder && e <= last_id);
  }
};

__device__ int bits_of_count(int64_t count) {
  return 64 - __clzll(count);
}

template <int kBits>
__device__ BalancedUps balanced(const RoundParams& params, int64_t group) {
  using Select = BlockSelect<kBits>;
  using Scan = BlockScan<int64_t, Add, Select::kThreads>;
  __shared__ typename Select::Shared shared;
  __shared__ typename Scan::Shared scan;
  const int64_t E = params.routing.spec.E, m = params.routing.spec.m;
  const auto each_remainder = [&](const auto& visit) {
    for (int64_t e = threadIdx.x; e < E; e += Select::kThreads)
      visit(e, static_cast<uint32_t>(params.scratch.counts[params.scratch.place(e, group)] % m));
  };
  int64_t sum = 0;
  each_remainder([&](int64_t, uint32_t remainder) { sum += remainder; });
  sum = Scan::scan(scan, sum).total;
  const auto ups = static_cast<int32_t>(balanced_ups(sum, m));
  if (ups == 0) return {};
  const Threshold last = Select::select(shared, ups, bits_of_count(m), [&](const auto& visit) {
    each_remainder([&](int64_t, uint32_t remainder) { visit(remainder); });
  });
  // The lowest ids are the greatest of E - 1 - id.
  const Threshold id = Select::select(shared, last.ties, bits_of_count(E), [&](const auto& visit) {
    each_remainder([&](int64_t e, uint32_t remainder) {
      if (remainder == last.value) visit(static_cast<uint32_t>(E - 1 - e));
    });
  });
  return {static_cast<int32_t>(last.value), E - 1 - id.value};
}

template <bool kSeveralGroups>
constexpr int kTargetBits = kSeveralGroups ? kLittleBits : kMuchBits;

// Of one group it also writes what add_groups writes of several.
template <bool kSeveralGroups>
__global__ void __launch_bounds__(1 << kTargetBits<kSeveralGroups>, 1)
    round_counts(const RoundParams params) {
  wait_for_previous();
  constexpr int kBits = kTargetBits<kSeveralGroups>, kThreads = 1 << kBits;
  const RoundScratch& scratch = params.scratch;
  const tilemoe_routing_spec& spec = params.routing.spec;
  const int64_t group = blockIdx.x, tokens = tokens_rounded_together(spec);
  const bool is_balanced = spec.rounding == TILEMOE_ROUND_BALANCED;
  const bool stochastic = spec.rounding == TILEMOE_ROUND_STOCHASTIC;
  const BalancedUps ups = is_balanced ? balanced<kBits>(params, group) : BalancedUps{};
  const int64_t seed = stochastic ? *params.seed : 0;
  const int64_t step = stochastic ? step_of_group(*params.step, scratch.groups.count, group) : 0;

  int32_t dropped = 0;  // of this thread's experts
  const auto target_of = [&](int64_t e) {
    const int64_t place = scratch.place(e, group);
    const int32_t f = scratch.counts[place];
    const auto remainder = static_cast<int32_t>(f % spec.m);
    const uint32_t bits = stochastic ? rounding_bits(seed, step, e) : 0;
    const bool up =
        is_balanced ? ups.goes_up(remainder, e) : rounds_up(spec.rounding, remainder, spec.m, bits);
    const int32_t target = rounded_count(f, tokens, spec.m, up);
    scratch.targets[place] = target;
    dropped += max(0, f - target);
    return target;
  };
  if constexpr (kSeveralGroups) {
    for (int64_t e = threadIdx.x; e < spec.E; e += kThreads)
      atomicAdd(&scratch.totals[e], target_of(e));
    dropped = __reduce_add_sync(kAllLanes, dropped);
    if (lane_index() == 0) atomicAdd(&scratch.totals[spec.E], dropped);
  } else {
    const auto rows_of = [&](int64_t e) {
      if (params.expert_counts != nullptr) params.expert_counts[e] = scratch.counts[e];
      return target_of(e);
    };
    fill_offsets<kThreads>(params, rows_of, [&] { return dropped; });
  }
}

// ------------------------------------------------------------ several groups, by expert

constexpr int kAddThreads = 256;

// A block an expert: what it has in the groups before each. One block more adds up all experts.
__global__ void __launch_bounds__(kAddThreads) add_groups(const RoundParams params) {
  wait_for_previous();
  using Scan = BlockScan<int32_t, Add, kAddThreads>;
  __shared__ Scan::Shared scan;
  const RoundScratch& scratch = params.scratch;
  const int64_t E = params.routing.spec.E, e = blockIdx.x;
  if (e == E)
    return fill_offsets<kAddThreads>(
        params, [&](int64_t expert) { return scratch.totals[expert]; },
        [&] { return threadIdx.x == 0 ? scratch.totals[E] : 0; });
  int32_t rows = 0, chosen = 0;
  for (int64_t g0 = 0; g0 < scratch.groups.count; g0 += kAddThreads) {
    const int64_t group = g0 + threadIdx.x, place = scratch.place(e, group);
    const bool exists = group < scratch.groups.count;
    const int32_t target = exists ? scratch.targets[place] : 0;
    chosen += exists ? scratch.counts[place] : 0;
    const Scan::Result sum = Scan::scan(scan, target);
    if (exists) scratch.rows_before[place] = rows + sum.inclusive - target;
    rows += sum.total;
  }
  chosen = Scan::scan(scan, chosen).total;
  if (threadIdx.x == 0 && params.expert_counts != nullptr) params.expert_counts[e] = chosen;
}

// ------------------------------------------------------------ rows, by expert and group

constexpr int64_t kLittleGroup = 8192;  // tokens of a group that a small block is enough for
constexpr int kAtOnce = 8;              // words whose loads are under way together

// The codes of the tokens that an expert takes: those above a threshold, and the first of those
// equal to it. Codes of tokens that chose it are above all others.
struct Selection {
  uint32_t threshold;
  int32_t ties;
};

// It shrinks, and takes the best of those that chose it; or takes all of them, and the best others.
// codes (count), on 16 bytes.
template <class Select>
__device__ Selection select_tokens(const uint32_t* codes, int64_t count, int32_t f, int32_t target,
                                   typename Select::Shared& shared) {
  const bool shrinks = target < f;
  const int32_t wanted = shrinks ? target : target - f;
  if (wanted == 0) return {shrinks ? ~0u : WeightCode::kChosen - 1, 0};
  const uint32_t side = shrinks ? WeightCode::kChosen : 0;
  const Threshold last = Select::select(shared, wanted, WeightCode::kBits, [&](const auto& visit) {
    const auto* quads = reinterpret_cast<const uint4*>(codes);
#pragma unroll 4
    for (int64_t i = threadIdx.x; i < count / 4; i += Select::kThreads) {
      const uint4 quad = quads[i];
      for (const uint32_t code : {quad.x, quad.y, quad.z, quad.w}) {
        const uint32_t ordered = code ^ side;  // kNone and the other side's fall out of range
        if (ordered - 1 < WeightCode::kChosen - 1) visit(ordered);
      }
    }
  });
  return {last.value | side, last.ties};
}

// The first `count` lanes of a mask.
__device__ __forceinline__ uint32_t first_lanes(uint32_t mask, int32_t count) {
  const int32_t below = __popc(mask & ((1u << lane_index()) - 1));
  return __ballot_sync(kAllLanes, (mask >> lane_index() & 1) != 0 && below < count);
}

// A warp takes a range of words, a lane a token.
template <int kBits>
__global__ void __launch_bounds__(1 << kBits, 1) fill_rows(const RoundParams params) {
  wait_for_previous();
  using Select = BlockSelect<kBits>;
  using Scan = typename Select::Scan;
  constexpr int kRowWarps = Select::kThreads / kWarp;
  __shared__ typename Select::Shared shared;
  const RoundScratch& scratch = params.scratch;
  const tilemoe_routing& routing = params.routing;
  const int64_t E = routing.spec.E, words = scratch.group_words;
  const uint32_t e = blockIdx.x % static_cast<uint32_t>(E);
  const uint32_t group = blockIdx.x / static_cast<uint32_t>(E);
  const int64_t place = scratch.place(e, group), first_token = group * scratch.groups.tokens;
  const uint32_t* codes = scratch.codes + e * scratch.code_stride() + group * words * kWordTokens;
  ExpertWord* const masks = scratch.masks + group * words * E + e;
  const Selection selection = select_tokens<Select>(
      codes, words * kWordTokens, scratch.counts[place], scratch.targets[place], shared);

  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = lane_index();
  const int64_t each = (words + kRowWarps - 1) / kRowWarps;
  const int64_t begin = min(words, warp * each), end = min(words, begin + each);
  int32_t above = 0, ties = 0;  // of this lane
#pragma unroll 8
  for (int64_t w = begin; w < end; ++w) {
    const uint32_t code = codes[w * kWordTokens + lane];
    above += code > selection.threshold ? 1 : 0;
    ties += code == selection.threshold ? 1 : 0;
  }
  const typename Scan::Result ties_through = Scan::scan(shared.scan, ties);
  const int32_t warp_ties = __reduce_add_sync(kAllLanes, ties);
  int32_t ties_before = __shfl_sync(kAllLanes, ties_through.inclusive - ties, 0);
  const auto taken_ties = [&](int32_t count) { return min(count, selection.ties); };
  const int32_t warp_takes = __reduce_add_sync(kAllLanes, above) +
                             taken_ties(ties_before + warp_ties) - taken_ties(ties_before);
  const typename Scan::Result through = Scan::scan(shared.scan, lane == 0 ? warp_takes : 0);

  const int32_t first_row = routing.offsets[e], room = routing.offsets[e + 1] - first_row;
  const int32_t in_groups_before = group > 0 ? scratch.rows_before[place] : 0;
  int32_t before =
      min(room, in_groups_before + __shfl_sync(kAllLanes, through.inclusive, 0) - warp_takes);
  for (int64_t w0 = begin; w0 < end; w0 += kAtOnce) {
    uint32_t code_of[kAtOnce];
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      code_of[i] = w0 + i < end ? codes[(w0 + i) * kWordTokens + lane] : WeightCode::kNone;
    ExpertWord word{};  // of lane i: word w0 + i
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const uint32_t code = code_of[i];
      uint32_t taken = __ballot_sync(kAllLanes, code > selection.threshold);
      if (const uint32_t tied = __ballot_sync(kAllLanes, code == selection.threshold); tied != 0) {
        taken |= first_lanes(tied, selection.ties - ties_before);
        ties_before += __popc(tied);
      }
      if (__popc(taken) > room - before) taken = first_lanes(taken, room - before);
      const uint32_t chosen = __ballot_sync(kAllLanes, WeightCode::chosen(code));
      if ((taken >> lane & 1) != 0) {
        const int32_t row = first_row + before + __popc(taken & ((1u << lane) - 1));
        routing.row_token[row] = static_cast<int32_t>(first_token + (w0 + i) * kWordTokens + lane);
        routing.row_score[row] = WeightCode::weight(code);
      }
      if (lane == i) word = {taken & chosen, taken & ~chosen, before};
      before += __popc(taken);
    }
    if (lane < kAtOnce && w0 + lane < end) masks[(w0 + lane) * E] = word;
  }
}

// ------------------------------------------------------------ pairs, by token

constexpr int kPairThreads = 256;
constexpr int kPairWarps = kPairThreads / kWarp;

// Row i of lane l becomes bit l of lane i.
__device__ uint32_t transpose_bits(uint32_t bits) {
  uint32_t mask = 0x0000ffff;
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2, mask ^= mask << half) {
    const uint32_t other = __shfl_xor_sync(kAllLanes, bits, half);
    const bool upper = (lane_index() & half) != 0;
    bits =
        upper ? (bits & ~mask) | (other >> half & mask) : (bits & mask) | (other << half & ~mask);
  }
  return bits;
}

// A warp takes 32 tokens. Their first pair is the sum of what every expert has before them.
__global__ void __launch_bounds__(kPairThreads, 4) list_pairs(const RoundParams params) {
  wait_for_previous();
  const tilemoe_routing& routing = params.routing;
  const int64_t E = routing.spec.E, K = routing.spec.K;
  const int lane = lane_index();
  const int64_t thread = int64_t{blockIdx.x} * kPairThreads + threadIdx.x;
  const int64_t w = thread / kWarp;
  for (int64_t pair = routing.offsets[E] + thread; pair < routing.spec.pairs;
       pair += int64_t{gridDim.x} * kPairThreads)
    routing.pair_row[pair] = -1;
  if (thread == 0) routing.token_offsets[0] = 0;
  if (w >= params.scratch.words) return;

  const WordTokens tokens = params.scratch.tokens_of(w);
  const int64_t t = tokens.first + lane;
  const ExpertWord* words = params.scratch.masks + w * E;
  const auto row_in = [&](int64_t e) {
    const ExpertWord word = words[e];
    const uint32_t below = (word.kept | word.added) & ((1u << lane) - 1);
    return routing.offsets[e] + word.rows_before + __popc(below);
  };
  // visit(e0, experts): bit i of `experts` tells whether e0 + i has a row for this lane's token.
  const auto each_expert = [&](const auto& mask_of, const auto& visit) {
    for (int64_t e0 = 0; e0 < E; e0 += kWarp)
      visit(e0, transpose_bits(e0 + lane < E ? mask_of(words[e0 + lane]) : 0));
  };
  int32_t before = 0, count = 0;
  for (int64_t e = lane; e < E; e += kWarp) before += words[e].rows_before;
  before = __reduce_add_sync(kAllLanes, before);
  each_expert([](const ExpertWord& word) { return word.kept | word.added; },
              [&](int64_t, uint32_t experts) { count += __popc(experts); });
  int32_t through = count;
#pragma unroll
  for (int distance = 1; distance < kWarp; distance *= 2) {
    const int32_t below = __shfl_up_sync(kAllLanes, through, distance);
    if (lane >= distance) through += below;
  }
  int32_t slot = before + through - count;
  if (lane < tokens.count) {
    routing.token_offsets[t + 1] = before + through;
    for (int64_t k0 = 0; k0 < K; k0 += kAtOnce) {
      int32_t row[kAtOnce];
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        row[i] = -1;
        if (k0 + i >= K) continue;
        const int32_t e = params.scratch.ids[t * K + k0 + i];
        if (words[e].kept >> lane & 1) row[i] = row_in(e);
      }
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i)
        if (row[i] >= 0) routing.pair_row[slot++] = row[i];
    }
  }
  each_expert([](const ExpertWord& word) { return word.added; },
              [&](int64_t e0, uint32_t experts) {
                for (; experts != 0; experts &= experts - 1)
                  routing.pair_row[slot++] = row_in(e0 + __ffs(static_cast<int>(experts)) - 1);
              });
}

}  // namespace

size_t round_scratch_bytes(const tilemoe_routing_spec& spec) {
  ScratchLayout layout(nullptr);
  RoundScratch(spec, layout);
  return layout.used();
}

void route_rounded(const tilemoe_routing& routing, const tilemoe_route_rounded_args& args) {
  const tilemoe_routing_spec& spec = routing.spec;
  const auto stream = static_cast<cudaStream_t>(args.stream);
  ScratchLayout layout(args.workspace);
  const RoundParams params{.routing = routing,
                           .seed = static_cast<const int64_t*>(args.seed.data),
                           .step = static_cast<const int64_t*>(args.step.data),
                           .expert_counts = static_cast<int32_t*>(args.expert_counts.data),
                           .scratch = RoundScratch(spec, layout)};
  const RoundScratch& scratch = params.scratch;
  weigh_tokens(args.logits, spec.K, scratch, args.stream);
  const auto experts = static_cast<unsigned>(spec.E);
  const auto groups = static_cast<unsigned>(scratch.groups.count);
  if (scratch.several_groups()) {
    launch_early<round_counts<true>>(
        {.blocks = groups, .threads = 1 << kTargetBits<true>, .stream = stream}, params);
    launch_early<add_groups>({.blocks = experts + 1, .threads = kAddThreads, .stream = stream},
                             params);
  } else {
    launch_early<round_counts<false>>(
        {.blocks = 1, .threads = 1 << kTargetBits<false>, .stream = stream}, params);
  }
  if (scratch.several_groups() && scratch.groups.tokens <= kLittleGroup)
    launch_early<fill_rows<kLittleBits>>(
        {.blocks = experts * groups, .threads = 1 << kLittleBits, .stream = stream}, params);
  else
    launch_early<fill_rows<kMuchBits>>(
        {.blocks = experts * groups, .threads = 1 << kMuchBits, .stream = stream}, params);
  const int64_t pair_blocks = (scratch.words + kPairWarps - 1) / kPairWarps;
  launch_early<list_pairs>(
      {.blocks = static_cast<unsigned>(pair_blocks + 1), .threads = kPairThreads, .stream = stream},
      params);
}

}  // namespace tilemoe::cuda
