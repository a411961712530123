// The routing from few tokens' choice, by one block: each expert's set of tokens tells how many rows
// it has, and a pair's place among them.
#pragma once

#include <cstdint>

#include "cuda/rowwise/block_scan.h"
#include "routing/few_tokens.h"

namespace tilemoe::cuda {

struct ChosenPairs {
  const int32_t* ids;   // (T, K) in [0, E), each once a token
  const float* scores;  // (T, K)
  int32_t T, E, K;
  tilemoe_routing routing;
  int32_t* expert_counts;  // out (E); null: not wanted
};

// E <= kMostE. Loops end with the last pair: where there is one token, the instructions for others are
// not fetched.
template <int kThreads, int kMostE>
__device__ void route_pairs(const ChosenPairs& params) {
  using few::TokenSet;
  using Scan = BlockScan<int32_t, Add, kThreads>;
  constexpr int kPairsEach = few::kMostTokens * few::kMostChosen / kThreads;
  __shared__ uint32_t tokens[TokenSet::kWords][kMostE], nan_tokens[TokenSet::kWords];
  __shared__ int32_t first_row[kMostE];
  __shared__ typename Scan::Shared scan;
  const tilemoe_routing& routing = params.routing;
  const auto thread = static_cast<int32_t>(threadIdx.x);
  const int32_t E = params.E, K = params.K, pairs = params.T * K;
  const auto capacity = static_cast<int32_t>(routing.spec.capacity);

  int32_t id[kPairsEach];
  float score[kPairsEach];
#pragma unroll
  for (int i = 0; i < kPairsEach; ++i) {
    const int32_t pair = thread + i * kThreads;
    id[i] = pair < pairs ? __ldcg(params.ids + pair) : 0;
    score[i] = pair < pairs ? __ldcg(params.scores + pair) : 0.f;
  }
#pragma unroll
  for (int w = 0; w < TokenSet::kWords; ++w) {
    for (int32_t e = thread; e < E; e += kThreads) tokens[w][e] = 0;
    if (thread == 0) nan_tokens[w] = 0;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPairsEach; ++i) {
    if (i * kThreads >= pairs) break;
    const int32_t pair = thread + i * kThreads, t = pair / K;
    if (pair >= pairs) continue;
    atomicOr(&tokens[TokenSet::word_of(t)][id[i]], TokenSet::bit_of(t));
    if (score[i] != score[i]) atomicOr(&nan_tokens[TokenSet::word_of(t)], TokenSet::bit_of(t));
  }
  __syncthreads();

  int32_t rows_before = 0;
  for (int32_t base = 0; base < E; base += kThreads) {
    const int32_t e = base + thread;
    const int32_t count = e < E ? TokenSet::count([&](int w) { return tokens[w][e]; }) : 0;
    const auto sum = Scan::scan(scan, count);
    if (e < E) {
      first_row[e] = rows_before + sum.inclusive - count;
      routing.offsets[e] = min(first_row[e], capacity);
      if (params.expert_counts != nullptr) params.expert_counts[e] = count;
    }
    rows_before += sum.total;
  }
  __syncthreads();
#pragma unroll
  for (int i = 0; i < kPairsEach; ++i) {
    if (i * kThreads >= pairs) break;
    const int32_t pair = thread + i * kThreads, t = pair / K;
    if (pair >= pairs) continue;
    const int32_t row =
        first_row[id[i]] + TokenSet::count_before(t, [&](int w) { return tokens[w][id[i]]; });
    routing.pair_row[pair] = row < capacity ? row : -1;
    if (row >= capacity) continue;
    routing.row_token[row] = t;
    routing.row_score[row] = score[i];
  }
  if (thread != 0) return;
  const int32_t fit = min(rows_before, capacity);
  routing.offsets[E] = fit;
  for (int i = 0; i < TILEMOE_COUNTERS; ++i) routing.counters[i] = 0;
  routing.counters[TILEMOE_COUNT_OVER_CAPACITY] = rows_before - fit;
  routing.counters[TILEMOE_COUNT_NAN_TOKENS] =
      TokenSet::count([&](int w) { return nan_tokens[w]; });
}

}  // namespace tilemoe::cuda
