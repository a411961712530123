// Token rounding. By token: its choice and every expert's weight, stored by expert
// (weigh_tokens.cu). One CTA per group of tokens: f' (round_targets.cu). By expert and group: a
// threshold instead of a sort, then the rows in order of tokens and masks of the tokens they are
// for. By token again: the rows it has, read off the masks.
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/round.h"
#include "cuda/kernels/wide_choice.h"

namespace tilemoe::cuda {
namespace {

// ------------------------------------------------------------ rows, by expert and group

constexpr int64_t kLittleGroup = 8192;  // tokens of a group that a small CTA is enough for
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
  // visit(e0, experts): bit i of `experts` is set if e0 + i has a row for this lane's token.
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
  const DeviceInfo& device = current_device();
  weigh_tokens(device, args.logits, spec.K, scratch, args.stream);
  const auto experts = static_cast<unsigned>(spec.E);
  const auto groups = static_cast<unsigned>(scratch.groups.count);
  find_targets(device, params, args.stream);
  if (scratch.several_groups() && scratch.groups.tokens <= kLittleGroup)
    launch_pdl<fill_rows<kLittleBits>>({.device = device,
                                        .blocks = experts * groups,
                                        .threads = 1 << kLittleBits,
                                        .stream = stream},
                                       params);
  else
    launch_pdl<fill_rows<kMuchBits>>(
        {.device = device, .blocks = experts * groups, .threads = 1 << kMuchBits, .stream = stream},
        params);
  const int64_t pair_blocks = (scratch.words + kPairWarps - 1) / kPairWarps;
  launch_pdl<list_pairs>({.device = device,
                          .blocks = static_cast<unsigned>(pair_blocks + 1),
                          .threads = kPairThreads,
                          .stream = stream},
                         params);
}

}  // namespace tilemoe::cuda
