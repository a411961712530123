#include <algorithm>

#include "cuda/core/launch.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/pair_sort.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 512;
constexpr int kWarps = kThreads / kWarp;
static_assert(PairBlocks::kPairsAtOnce == kThreads);  // so that every warp has whole groups of 32

// Experts whose counts are in shared memory together; with more experts, CTAs go through their
// pairs once per range.
constexpr int kCountRange = 8192;  // 32 KiB
constexpr int kPlaceRange = 1376;  // 18 numbers each, 97 KiB
constexpr int kAtOnce = 8;         // pairs of a thread whose loads are in flight together

struct SortParams {
  Pairs pairs;
  int64_t block_size;
  int32_t blocks;
  int32_t capacity;
  int32_t* counts;     // (blocks, E + 2)
  int32_t* offsets;    // (E + 1)
  int32_t* counters;   // (TILEMOE_COUNTERS)
  int32_t* row_token;  // (capacity)
  float* row_score;    // (capacity)
  int32_t* pair_row;   // (pairs)

  __device__ int64_t begin(int64_t block) const { return block * block_size; }
  __device__ int64_t end(int64_t block) const {
    const int64_t end = (block + 1) * block_size;
    return end < pairs.count ? end : pairs.count;
  }
  __device__ int32_t* counts_of(int64_t block) const { return counts + block * (pairs.E + 2); }
};

// Whether `pair`, whose score is NaN, is the first such pair of its token.
__device__ bool is_first_nan(const Pairs& pairs, int64_t pair) {
  const int32_t token = pairs.token(pair);
  while (--pair >= 0 && pairs.token(pair) == token)
    if (pairs.expert(pair) != kSkipped && pairs.is_nan(pair)) return false;
  return true;
}

__global__ void __launch_bounds__(kThreads, 1) count_pairs(const SortParams params) {
  __shared__ int32_t counts[kCountRange];
  __shared__ int32_t skipped, nan_tokens;
  const Pairs& pairs = params.pairs;
  int32_t* const out = params.counts_of(blockIdx.x);
  wait_for_previous();  // the pairs are complete, and place_pairs may read them
  if (threadIdx.x == 0) skipped = nan_tokens = 0;
  for (int64_t first = 0; first < pairs.E; first += kCountRange) {
    const auto range = static_cast<int32_t>(min(int64_t{kCountRange}, pairs.E - first));
    for (int e = static_cast<int>(threadIdx.x); e < range; e += kThreads) counts[e] = 0;
    __syncthreads();
    const int64_t end = params.end(blockIdx.x);
    for (int64_t base = params.begin(blockIdx.x) + threadIdx.x; base < end;
         base += kAtOnce * kThreads) {
      int32_t expert[kAtOnce];
      float score[kAtOnce] = {};
      pairs.load_experts(base, kThreads, end, expert);
      if (first == 0) pairs.scores.load(base, kThreads, end, score);
#pragma unroll
      for (int i = 0; i < kAtOnce; ++i) {
        const int64_t place = expert[i] - first;
        if (expert[i] >= 0 && place >= 0 && place < range) atomicAdd(&counts[place], 1);
        if (first == 0 && expert[i] == kSkipped) atomicAdd(&skipped, 1);
        if (expert[i] >= 0 && score[i] != score[i] && is_first_nan(pairs, base + i * kThreads))
          atomicAdd(&nan_tokens, 1);
      }
    }
    __syncthreads();
    for (int e = static_cast<int>(threadIdx.x); e < range; e += kThreads)
      out[first + e] = counts[e];  // which this thread clears
  }
  if (threadIdx.x == 0) out[pairs.E] = skipped, out[pairs.E + 1] = nan_tokens;
}

// A block's tables for a range of experts, in shared memory.
struct Tables {
  int32_t range;
  int32_t* rows;    // (kWarps, range) a warp's count of an expert, then its next row
  int32_t* before;  // (range) pairs of the blocks before this one
  int32_t* total;   // (range) pairs of all blocks

  __device__ Tables(int32_t* memory, int32_t experts)
      : range(experts), rows(memory), before(rows + kWarps * experts), total(before + experts) {}
};

// Adds the range's columns of the table of counts; a column's rows are shared out among threads.
__device__ void add_columns(const SortParams& params, int64_t first, const Tables& tables) {
  const int32_t range = tables.range, groups = max(1, kThreads / range);
  for (int i = static_cast<int>(threadIdx.x); i < groups * range; i += kThreads) {
    const int32_t e = i % range;
    int32_t before = 0, total = 0;
#pragma unroll 16
    for (int32_t block = i / range; block < params.blocks; block += groups) {
      const int32_t count = params.counts_of(block)[first + e];
      total += count;
      before += block < static_cast<int32_t>(blockIdx.x) ? count : 0;
    }
    atomicAdd(&tables.before[e], before);
    atomicAdd(&tables.total[e], total);
  }
}

// One CTA in addition to those of the pairs writes the totals while the others place their pairs.
__device__ bool is_past_last(const SortParams& params) {
  return static_cast<int32_t>(blockIdx.x) == params.blocks;
}

// From counts to the first row of every warp for every expert; returns the rows up to the range's
// end, `rows_before` being those up to its begin. The block past the last writes the offsets.
__device__ int32_t find_rows(const SortParams& params, int64_t first, const Tables& tables,
                             int32_t rows_before) {
  using Scan = BlockScan<int32_t, Add, kThreads>;
  __shared__ typename Scan::Shared shared;
  for (int32_t base = 0; base < tables.range; base += kThreads) {
    const int32_t e = base + static_cast<int32_t>(threadIdx.x);
    const bool exists = e < tables.range;
    const int32_t total = exists ? tables.total[e] : 0;
    const auto sum = Scan::scan(shared, total);
    const int32_t offset = rows_before + sum.inclusive - total;
    rows_before += sum.total;
    if (!exists) continue;
    if (is_past_last(params)) params.offsets[first + e] = min(offset, params.capacity);
    int32_t row = offset + tables.before[e], count[kWarps];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) count[w] = tables.rows[w * tables.range + e];
#pragma unroll
    for (int w = 0; w < kWarps; ++w) {
      tables.rows[w * tables.range + e] = row;
      row += count[w];
    }
  }
  return rows_before;
}

// 32 pairs of a warp: equal experts stand in the order of lanes.
__device__ __forceinline__ void place_group(const SortParams& params, int64_t pair, int32_t expert,
                                            float score, int64_t first, int32_t range,
                                            int32_t* rows) {
  const int64_t place = expert - first;
  const bool mine = expert >= 0 && place >= 0 && place < range;
  const unsigned peers = __match_any_sync(kAllLanes, mine ? expert : kSkipped);
  const int32_t rank = __popc(peers & ((1u << lane_index()) - 1));
  const int32_t row = mine ? rows[place] + rank : -1;
  __syncwarp();
  if (mine && rank + 1 == __popc(peers)) rows[place] = row + 1;
  __syncwarp();
  const bool fits = row < params.capacity;
  if (mine) params.pair_row[pair] = fits ? row : -1;
  if (expert == kSkipped && first == 0) params.pair_row[pair] = -1;
  if (!mine || !fits) return;
  params.row_token[row] = params.pairs.token(pair);
  params.row_score[row] = score;
}

// A warp's pairs in their order.
__device__ void place_warp(const SortParams& params, int64_t begin, int64_t end, int64_t first,
                           int32_t range, int32_t* rows) {
  for (int64_t base = begin; base < end; base += kAtOnce * kWarp) {
    const int64_t pair = base + lane_index();
    int32_t expert[kAtOnce];
    float score[kAtOnce];
    params.pairs.load_experts(pair, kWarp, end, expert);
    params.pairs.scores.load(pair, kWarp, end, score);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i)
      if (base + i * kWarp < end)
        place_group(params, pair + i * kWarp, expert[i], score[i], first, range, rows);
  }
}

// How many of a warp's pairs are of each expert.
__device__ void count_warp(const SortParams& params, int64_t begin, int64_t end, int64_t first,
                           int32_t range, int32_t* counts) {
  for (int64_t pair = begin + lane_index(); pair < end; pair += kAtOnce * kWarp) {
    int32_t expert[kAtOnce];
    params.pairs.load_experts(pair, kWarp, end, expert);
#pragma unroll
    for (int i = 0; i < kAtOnce; ++i) {
      const int64_t place = expert[i] - first;
      if (expert[i] >= 0 && place >= 0 && place < range) atomicAdd(&counts[place], 1);
    }
  }
}

// One warp.
__device__ void fill_counters(const SortParams& params, int32_t rows) {
  int32_t skipped = 0, nan_tokens = 0;
  for (int32_t block = lane_index(); block < params.blocks; block += kWarp) {
    skipped += params.counts_of(block)[params.pairs.E];
    nan_tokens += params.counts_of(block)[params.pairs.E + 1];
  }
  skipped = __reduce_add_sync(kAllLanes, skipped);
  nan_tokens = __reduce_add_sync(kAllLanes, nan_tokens);
  if (lane_index() != 0) return;
  const int32_t fit = min(rows, params.capacity);
  params.offsets[params.pairs.E] = fit;
  for (int i = 0; i < TILEMOE_COUNTERS; ++i) params.counters[i] = 0;
  params.counters[TILEMOE_COUNT_OVER_CAPACITY] = rows - fit;
  params.counters[TILEMOE_COUNT_BAD_IDS] = skipped;
  params.counters[TILEMOE_COUNT_NAN_TOKENS] = nan_tokens;
}

__global__ void __launch_bounds__(kThreads, 1) place_pairs(const SortParams params) {
  TILEMOE_DYNAMIC_SHARED(int32_t, memory, alignof(int32_t));
  const Pairs& pairs = params.pairs;
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t per_warp = params.block_size / kWarps;
  const int64_t begin = params.begin(blockIdx.x) + warp * per_warp;
  const int64_t end = min(begin + per_warp, params.end(blockIdx.x));
  int32_t rows_before = 0;
  for (int64_t first = 0; first < pairs.E; first += kPlaceRange) {
    const Tables tables(memory, static_cast<int32_t>(min(int64_t{kPlaceRange}, pairs.E - first)));
    int32_t* const warp_rows = tables.rows + warp * tables.range;
    for (int i = static_cast<int>(threadIdx.x); i < (kWarps + 2) * tables.range; i += kThreads)
      memory[i] = 0;
    __syncthreads();
    count_warp(params, begin, end, first, tables.range, warp_rows);
    pdl_wait();  // the counts of all CTAs are complete
    add_columns(params, first, tables);
    __syncthreads();
    rows_before = find_rows(params, first, tables, rows_before);
    __syncthreads();
    place_warp(params, begin, end, first, tables.range, warp_rows);
    __syncthreads();  // the next range overwrites the tables
  }
  if (is_past_last(params) && warp == 0) fill_counters(params, rows_before);
}

}  // namespace

void sort_pairs(const DeviceInfo& device, const Pairs& pairs, const PairScratch& scratch,
                const tilemoe_routing& routing, void* stream) {
  const SortParams params{.pairs = pairs,
                          .block_size = scratch.blocks.size,
                          .blocks = static_cast<int32_t>(scratch.blocks.count),
                          .capacity = static_cast<int32_t>(routing.spec.capacity),
                          .counts = scratch.counts,
                          .offsets = routing.offsets,
                          .counters = routing.counters,
                          .row_token = routing.row_token,
                          .row_score = routing.row_score,
                          .pair_row = routing.pair_row};
  const auto blocks = static_cast<unsigned>(params.blocks);
  const auto on = static_cast<cudaStream_t>(stream);
  constexpr int kBytesEach = (kWarps + 2) * sizeof(int32_t);
  allow_shared_memory<place_pairs, kPlaceRange * kBytesEach>(device);
  launch_pdl<count_pairs>({.device = device, .blocks = blocks, .threads = kThreads, .stream = on},
                          params);
  launch_pdl<place_pairs>({.device = device,
                           .blocks = blocks + 1,
                           .threads = kThreads,
                           .stream = on,
                           .shared_bytes = std::min(kPlaceRange, pairs.E) * kBytesEach},
                          params);
}

// From each token's chosen ids and scores.
void route_top_k(const tilemoe_routing& routing, const tilemoe_route_top_k_args& args) {
  ScratchLayout layout(args.workspace);
  const PairScratch scratch(routing.spec, layout);
  sort_pairs(current_device(),
             {.experts = integer_array(args.ids),
              .scores = float_array(args.scores),
              .tokens = nullptr,
              .K = static_cast<int32_t>(routing.spec.K),
              .E = static_cast<int32_t>(routing.spec.E),
              .count = routing.spec.pairs},
             scratch, routing, args.stream);
}

size_t pair_scratch_bytes(const tilemoe_routing_spec& spec) {
  ScratchLayout layout(nullptr);
  const PairScratch scratch(spec, layout);
  return layout.used();
}

}  // namespace tilemoe::cuda
