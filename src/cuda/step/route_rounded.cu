// Token rounding. By token: its choice and every expert's weight, stored by expert
// (weigh_tokens.cu). One block: f'. By expert: a threshold instead of a sort, then the rows in
// order of tokens and masks of the tokens they are for. By token again: the rows it has, read off
// the masks.
#include "check.h"
#include "cuda/device.h"
#include "cuda/routing/block_scan.h"
#include "cuda/routing/launch.h"
#include "cuda/routing/round_scratch.h"
#include "cuda/routing/select.h"
#include "cuda/step/routing.h"
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

// ------------------------------------------------------------ f', one block

constexpr int kTargetThreads = BlockSelect::kThreads;

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

__device__ BalancedUps balanced(const RoundParams& params, BlockSelect::Shared& shared,
                                BlockScan<int64_t, Add, kTargetThreads>::Shared& scan) {
  const int64_t E = params.routing.spec.E, m = params.routing.spec.m;
  const auto each_remainder = [&](const auto& visit) {
    for (int64_t e = threadIdx.x; e < E; e += kTargetThreads)
      visit(e, static_cast<uint32_t>(params.scratch.counts[e] % m));
  };
  int64_t sum = 0;
  each_remainder([&](int64_t, uint32_t remainder) { sum += remainder; });
  sum = BlockScan<int64_t, Add, kTargetThreads>::scan(scan, sum).total;
  const auto ups = static_cast<int32_t>(balanced_ups(sum, m));
  if (ups == 0) return {};
  const Threshold last = BlockSelect::select(shared, ups, bits_of_count(m), [&](const auto& visit) {
    each_remainder([&](int64_t, uint32_t remainder) { visit(remainder); });
  });
  // The lowest ids are the greatest of E - 1 - id.
  const Threshold id =
      BlockSelect::select(shared, last.ties, bits_of_count(E), [&](const auto& visit) {
        each_remainder([&](int64_t e, uint32_t remainder) {
          if (remainder == last.value) visit(static_cast<uint32_t>(E - 1 - e));
        });
      });
  return {static_cast<int32_t>(last.value), E - 1 - id.value};
}

__global__ void __launch_bounds__(kTargetThreads, 1) round_counts(const RoundParams params) {
  wait_for_previous();
  using Scan = BlockScan<int64_t, Add, kTargetThreads>;
  __shared__ BlockSelect::Shared select;
  __shared__ Scan::Shared scan;
  const tilemoe_routing& routing = params.routing;
  const tilemoe_routing_spec& spec = routing.spec;
  const bool is_balanced = spec.rounding == TILEMOE_ROUND_BALANCED;
  const bool stochastic = spec.rounding == TILEMOE_ROUND_STOCHASTIC;
  const BalancedUps ups = is_balanced ? balanced(params, select, scan) : BalancedUps{};
  const int64_t seed = stochastic ? *params.seed : 0, step = stochastic ? *params.step : 0;

  int64_t rows = 0;
  for (int64_t e0 = 0; e0 < spec.E; e0 += kTargetThreads) {
    const int64_t e = e0 + threadIdx.x;
    int32_t target = 0;
    if (e < spec.E) {
      const int32_t f = params.scratch.counts[e];
      const auto remainder = static_cast<int32_t>(f % spec.m);
      const uint32_t bits = stochastic ? rounding_bits(seed, step, e) : 0;
      const bool up = is_balanced ? ups.goes_up(remainder, e)
                                  : rounds_up(spec.rounding, remainder, spec.m, bits);
      target = rounded_count(f, spec.T, spec.m, up);
      params.scratch.targets[e] = target;
      if (params.expert_counts != nullptr) params.expert_counts[e] = f;
    }
    const Scan::Result sum = Scan::scan(scan, target);
    if (e < spec.E)
      routing.offsets[e] = static_cast<int32_t>(min(rows + sum.inclusive - target, spec.capacity));
    rows += sum.total;
  }
  int64_t nan_tokens = 0;
  for (int64_t w = threadIdx.x; w < params.scratch.words; w += kTargetThreads)
    nan_tokens += params.scratch.nan_tokens[w];
  nan_tokens = Scan::scan(scan, nan_tokens).total;
  if (threadIdx.x != 0) return;
  const int64_t fits = min(rows, spec.capacity);
  routing.offsets[spec.E] = static_cast<int32_t>(fits);
  for (int i = 0; i < TILEMOE_COUNTERS; ++i) routing.counters[i] = 0;
  routing.counters[TILEMOE_COUNT_OVER_CAPACITY] =
      static_cast<int32_t>(min(rows - fits, int64_t{INT32_MAX}));
  routing.counters[TILEMOE_COUNT_NAN_TOKENS] = static_cast<int32_t>(nan_tokens);
}

// ------------------------------------------------------------ rows, by expert

constexpr int kRowThreads = BlockSelect::kThreads;
constexpr int kRowWarps = kRowThreads / kWarp;
constexpr int kAtOnce = 8;  // words whose loads are under way together

// The codes of the tokens that an expert takes: those above a threshold, and the first of those
// equal to it. Codes of tokens that chose it are above all others.
struct Selection {
  uint32_t threshold;
  int32_t ties;
};

// It shrinks, and takes the best of those that chose it; or takes all of them, and the best others.
__device__ Selection select_tokens(const uint32_t* codes, int64_t stride, int32_t f, int32_t target,
                                   BlockSelect::Shared& shared) {
  const bool shrinks = target < f;
  const int32_t wanted = shrinks ? target : target - f;
  if (wanted == 0) return {shrinks ? ~0u : WeightCode::kChosen - 1, 0};
  const uint32_t side = shrinks ? WeightCode::kChosen : 0;
  const Threshold last =
      BlockSelect::select(shared, wanted, WeightCode::kBits, [&](const auto& visit) {
        const auto* quads = reinterpret_cast<const uint4*>(codes);
#pragma unroll 4
        for (int64_t i = threadIdx.x; i < stride / 4; i += kRowThreads) {
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
__global__ void __launch_bounds__(kRowThreads, 1) fill_rows(const RoundParams params) {
  wait_for_previous();
  using Scan = BlockScan<int32_t, Add, kRowThreads>;
  __shared__ BlockSelect::Shared shared;
  const tilemoe_routing& routing = params.routing;
  const int64_t E = routing.spec.E, words = params.scratch.words;
  const auto e = static_cast<int32_t>(blockIdx.x);
  const int64_t stride = params.scratch.code_stride();
  const uint32_t* codes = params.scratch.codes + e * stride;
  const Selection selection =
      select_tokens(codes, stride, params.scratch.counts[e], params.scratch.targets[e], shared);

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
  const Scan::Result ties_through = Scan::scan(shared.scan, ties);
  const int32_t warp_ties = __reduce_add_sync(kAllLanes, ties);
  int32_t ties_before = __shfl_sync(kAllLanes, ties_through.inclusive - ties, 0);
  const auto taken_ties = [&](int32_t count) { return min(count, selection.ties); };
  const int32_t warp_takes = __reduce_add_sync(kAllLanes, above) +
                             taken_ties(ties_before + warp_ties) - taken_ties(ties_before);
  const Scan::Result through = Scan::scan(shared.scan, lane == 0 ? warp_takes : 0);

  const int32_t first_row = routing.offsets[e], room = routing.offsets[e + 1] - first_row;
  int32_t before = min(room, __shfl_sync(kAllLanes, through.inclusive, 0) - warp_takes);
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
        routing.row_token[row] = static_cast<int32_t>((w0 + i) * kWordTokens + lane);
        routing.row_score[row] = WeightCode::weight(code);
      }
      if (lane == i) word = {taken & chosen, taken & ~chosen, before};
      before += __popc(taken);
    }
    if (lane < kAtOnce && w0 + lane < end) params.scratch.masks[(w0 + lane) * E + e] = word;
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
  const int64_t T = routing.spec.T, E = routing.spec.E, K = routing.spec.K;
  const int lane = lane_index();
  const int64_t thread = int64_t{blockIdx.x} * kPairThreads + threadIdx.x;
  const int64_t w = thread / kWarp, t = thread;
  for (int64_t pair = routing.offsets[E] + thread; pair < routing.spec.pairs;
       pair += int64_t{gridDim.x} * kPairThreads)
    routing.pair_row[pair] = -1;
  if (thread == 0) routing.token_offsets[0] = 0;
  if (w >= params.scratch.words) return;

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
  if (t < T) {
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
  TILEMOE_CHECK_SUPPORTED(
      spec.round_tokens == 0 || spec.round_tokens == spec.T,
      "round_tokens is " << spec.round_tokens << ": the CUDA backend rounds all tokens together");
  const auto stream = static_cast<cudaStream_t>(args.stream);
  ScratchLayout layout(args.workspace);
  const RoundParams params{.routing = routing,
                           .seed = static_cast<const int64_t*>(args.seed.data),
                           .step = static_cast<const int64_t*>(args.step.data),
                           .expert_counts = static_cast<int32_t*>(args.expert_counts.data),
                           .scratch = RoundScratch(spec, layout)};
  const RoundScratch& scratch = params.scratch;
  weigh_tokens(args.logits, spec.K, scratch, args.stream);
  launch_early(round_counts, 1, kTargetThreads, 0, stream, params);
  launch_early(fill_rows, static_cast<unsigned>(spec.E), kRowThreads, 0, stream, params);
  const int64_t pair_blocks = (scratch.words + kPairWarps - 1) / kPairWarps;
  launch_early(list_pairs, static_cast<unsigned>(pair_blocks + 1), kPairThreads, 0, stream, params);
}

}  // namespace tilemoe::cuda
