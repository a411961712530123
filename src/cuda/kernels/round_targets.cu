// Token rounding's second step: every expert's rows f' from its counts f, one CTA per group of
// tokens, and the totals of all rows. With several groups, another launch adds up the rows that
// each expert has in the previous groups.
#include "cuda/core/launch.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/round.h"
#include "cuda/kernels/wide_choice.h"
#include "routing/rounding.h"

namespace tilemoe::cuda {
namespace {

// ------------------------------------------------------------ totals of all rows

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

// ------------------------------------------------------------ f', one CTA per group

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

// One CTA per expert: its rows in the groups before each. Another CTA adds up all experts.
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

}  // namespace

void find_targets(const DeviceInfo& device, const RoundParams& params, void* stream) {
  const auto on = static_cast<cudaStream_t>(stream);
  const auto groups = static_cast<unsigned>(params.scratch.groups.count);
  const auto experts = static_cast<unsigned>(params.routing.spec.E);
  if (params.scratch.several_groups()) {
    launch_pdl<round_counts<true>>(
        {.device = device, .blocks = groups, .threads = 1 << kTargetBits<true>, .stream = on},
        params);
    launch_pdl<add_groups>(
        {.device = device, .blocks = experts + 1, .threads = kAddThreads, .stream = on}, params);
  } else {
    launch_pdl<round_counts<false>>(
        {.device = device, .blocks = 1, .threads = 1 << kTargetBits<false>, .stream = on}, params);
  }
}

}  // namespace tilemoe::cuda
