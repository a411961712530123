// Routing at small T: parts of the logits, and the routing from the choices by one CTA.
//
// A part of the logits is 512 columns of one expert, by one warp, which has the weights of the
// expert in registers and goes through tokens.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/core/recipe.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/warp_choice.h"
#include "cuda/ptx/copy.h"
#include "routing/decode.h"

namespace tilemoe::cuda {

using decode::kLaneColumns, decode::kStretches;

constexpr int kTokensAtOnce = 4;  // of a warp, whose loads are under way together

struct Matrix {
  const char* data;
  tilemoe_dtype dtype;
  int64_t row_bytes;

  template <class Element>
  __device__ __forceinline__ const Element* row(int64_t r) const {
    return reinterpret_cast<const Element*>(data + r * row_bytes);
  }
};

struct PartialLogits {
  Matrix X;       // (T, d)
  Matrix weight;  // (E, d) of X's type or float32
  int32_t d, parts, T, E;
  float* sums;  // out (parts, T, E)

  __device__ float* sums_of(int32_t part, int32_t t) const { return sums + (part * T + t) * E; }
};

__device__ __forceinline__ void load_eight(const float* from, float (&out)[kLaneColumns]) {
  const float4 low = *reinterpret_cast<const float4*>(from);
  const float4 high = *reinterpret_cast<const float4*>(from + 4);
  out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
  out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
}
template <class Element>
__device__ __forceinline__ void load_eight(const Element* from, float (&out)[kLaneColumns]) {
  unpack_eight<Element>(*reinterpret_cast<const uint4*>(from), out);
}

// A lane's columns of a part; 0 past d.
template <class Element>
__device__ __forceinline__ void load_part(const Element* row, int32_t part, int32_t d,
                                          float (&out)[kStretches][kLaneColumns]) {
#pragma unroll
  for (int s = 0; s < kStretches; ++s) {
    const int64_t first = decode::first_column(part, s, lane_index());
#pragma unroll
    for (float& x : out[s]) x = 0.f;
    if (first < d) load_eight(row + first, out[s]);
  }
}

// order::add_lanes of each of the sums; lane l returns that of sum l * kCount / 32. While a lane
// has several, the two halves of the lanes exchange, and each goes on with half of the sums.
template <int kCount>
__device__ __forceinline__ float add_lanes_of_each(float (&sum)[kCount]) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) {
    const int left = kCount * half / kWarp;  // sums that a lane has after this step; 0: one before
    if (left == 0) {
      sum[0] += __shfl_xor_sync(kAllLanes, sum[0], half);
      continue;
    }
    const bool upper = (lane_index() & half) != 0;
#pragma unroll
    for (int i = 0; i < left; ++i) {
      const float kept = upper ? sum[left + i] : sum[i], given = upper ? sum[i] : sum[left + i];
      sum[i] = kept + __shfl_xor_sync(kAllLanes, given, half);
    }
  }
  return sum[0];
}

// A part of one expert's logits of kCount tokens.
template <int kCount, class Element>
__device__ __forceinline__ void add_tokens(const PartialLogits& params,
                                           const float (&weight)[kStretches][kLaneColumns],
                                           int32_t expert, int32_t part, int32_t first) {
  float x[kCount][kStretches][kLaneColumns];
#pragma unroll
  for (int i = 0; i < kCount; ++i)
    load_part(params.X.row<Element>(first + i), part, params.d, x[i]);
  float sum[kCount] = {};
#pragma unroll
  for (int i = 0; i < kCount; ++i)
#pragma unroll
    for (int s = 0; s < kStretches; ++s) sum[i] = decode::add_columns(x[i][s], weight[s], sum[i]);
  const float total = add_lanes_of_each(sum);
  constexpr int kLanesEach = kWarp / kCount;
  if (lane_index() % kLanesEach == 0)
    params.sums_of(part, first + lane_index() / kLanesEach)[expert] = total;
}

// A part of one expert's logits, by one warp.
template <class Element, class Weight>
__device__ void add_part(const PartialLogits& params, int32_t expert, int32_t part, int32_t first,
                         int32_t end) {
  float weight[kStretches][kLaneColumns];
  load_part(params.weight.row<Weight>(expert), part, params.d, weight);
  int32_t t = first;
  for (; t + kTokensAtOnce <= end; t += kTokensAtOnce)
    add_tokens<kTokensAtOnce, Element>(params, weight, expert, part, t);
  for (; t < end; ++t) add_tokens<1, Element>(params, weight, expert, part, t);
}

// The weight has X's type or is float32.
template <class Element>
__device__ void add_part_of(const PartialLogits& params, int32_t expert, int32_t part,
                            int32_t first, int32_t end) {
  if (params.weight.dtype == TILEMOE_FLOAT32)
    add_part<Element, float>(params, expert, part, first, end);
  else
    add_part<Element, Element>(params, expert, part, first, end);
}

__device__ void add_part_of_any(const PartialLogits& params, int32_t expert, int32_t part,
                                int32_t first, int32_t end) {
  switch (params.X.dtype) {
    case TILEMOE_BFLOAT16: return add_part_of<__nv_bfloat16>(params, expert, part, first, end);
    case TILEMOE_FLOAT16: return add_part_of<__half>(params, expert, part, first, end);
    default: return add_part_of<float>(params, expert, part, first, end);
  }
}

__device__ __forceinline__ void prefetch_weight(const PartialLogits& params, int32_t expert,
                                                int32_t part) {
  const int64_t element = params.weight.dtype == TILEMOE_FLOAT32 ? 4 : 2;
#pragma unroll
  for (int s = 0; s < kStretches; ++s) {
    const int64_t column = decode::first_column(part, s, lane_index());
    if (column < params.d) ptx::prefetch_to_l2(params.weight.row<char>(expert) + column * element);
  }
}

// The routing from the choices at small T, by one CTA: the set of tokens of each expert gives its
// number of rows, and the place of a pair among them.

struct ChosenPairs {
  const int32_t* ids;   // (T, K) in [0, E), each once a token
  const float* scores;  // (T, K)
  int32_t T, E, K;
  tilemoe_routing routing;
  int32_t* expert_counts;  // out (E); null: not wanted
};

// E <= kMaxE. Loops end with the last pair: for one token, the instructions for others are not
// fetched.
template <int kThreads, int kMaxE>
__device__ void route_pairs(const ChosenPairs& params) {
  using decode::TokenSet;
  using Scan = BlockScan<int32_t, Add, kThreads>;
  constexpr int kPairsEach = decode::kMaxTokens * decode::kMaxChosen / kThreads;
  __shared__ uint32_t tokens[TokenSet::kWords][kMaxE], nan_tokens[TokenSet::kWords];
  __shared__ int32_t first_row[kMaxE];
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
