// Routing at small T from the tokens themselves, in one launch:
//
//   every CTA              a part of 512 columns of the logits of eight experts, 16 tokens: so
//                          the weights, which no kernel read before, are loaded by many SMs
//   the last of a tile     adds the parts of its 16 tokens, rounds, and chooses: one warp per token
//   the last of these      sorts all pairs by expert: from each expert's set of tokens follow the
//                          offsets, and a pair's row from how many of the set are before its token
#include <algorithm>

#include "core/check.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/route_tokens.h"
#include "cuda/kernels/top_k.h"
#include "routing/decode.h"
#include "routing/spec.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kTileTokens = 16;
constexpr int kMaxTiles = decode::kMaxTokens / kTileTokens;

struct RouteTokensParams {
  PartialLogits partial;
  FloatArray bias;  // (E); data null: none
  tilemoe_dtype logits_dtype;
  void* logits;       // (T, E) of logits_dtype; null: not wanted
  TopKParams choice;  // without logits; its ids and scores are those of `pairs`
  ChosenPairs pairs;
  Counter* counters;  // (kMaxTiles + 1)
  Counter stamp;

  __device__ Arrivals arrivals(int32_t which) const { return {counters + which, stamp}; }
};

// ---------------------------------------------------------------- choice

// The numbers that rank the experts, which are stored if logits are wanted.
__device__ __forceinline__ float rounded_logit(const RouteTokensParams& params, int64_t place,
                                               float x) {
  const auto as = [&]<class Logit>(Logit rounded) {
    store(x, rounded);
    if (params.logits != nullptr) static_cast<Logit*>(params.logits)[place] = rounded;
    return to_float(rounded);
  };
  switch (params.logits_dtype) {
    case TILEMOE_BFLOAT16: return as(BFloat16{});
    case TILEMOE_FLOAT16: return as(Float16{});
    default: return as(0.f);
  }
}

// Token t's logits, in shared memory: the loads of all parts of several tokens are in flight
// together.
template <int kSlots>
__device__ __forceinline__ void add_parts(const RouteTokensParams& params, int32_t t, float* row) {
  constexpr int kPartsAtOnce = kSlots <= 4 ? 8 : kSlots <= 8 ? 4 : 2;
  const int32_t E = params.choice.E;
  float sum[kSlots] = {};
  for (int32_t first = 0; first < params.partial.parts; first += kPartsAtOnce) {
    float part[kPartsAtOnce][kSlots];
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p)
#pragma unroll
      for (int s = 0; s < kSlots; ++s) {
        const int32_t e = s * kWarp + lane_index();
        if (first + p < params.partial.parts && e < E)
          part[p][s] = __ldcg(params.partial.sums_of(first + p, t) + e);
      }
#pragma unroll
    for (int p = 0; p < kPartsAtOnce; ++p)
#pragma unroll
      for (int s = 0; s < kSlots; ++s)
        if (first + p < params.partial.parts && s * kWarp + lane_index() < E) sum[s] += part[p][s];
  }
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int32_t e = s * kWarp + lane_index();
    if (e >= E) continue;
    if (params.bias.data != nullptr) sum[s] += params.bias.at(e);
    row[e] = rounded_logit(params, int64_t{t} * E + e, sum[s]);
  }
  __syncwarp();
}

// The tokens [first, end), by all warps of the CTA.
template <int kSlots>
__device__ void choose_tokens(const RouteTokensParams& params, int32_t first, int32_t end) {
  using Groups = WarpGroups<kSlots>;
  __shared__ float logits[kWarps][kSlots * kWarp];
  __shared__ __align__(16) float rows[kWarps][Groups::kSharedFloats];
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const TopKParams& choice = params.choice;
  const FloatArray row{logits[warp], TILEMOE_FLOAT32};
  for (int32_t t = first + warp; t < end; t += kWarps) {
    add_parts<kSlots>(params, t, logits[warp]);
    int32_t id;
    float score;
    if (choice.groups.limits())
      choose_by_warp<kSlots>(choice, Groups(choice.groups, rows[warp]), row, id, score);
    else
      choose_by_warp<kSlots>(choice, NoGroups(), row, id, score);
    if (lane_index() < choice.K) store_by_warp(choice, t, id, score);
    __syncwarp();  // the next token's logits take the place of these
  }
}

// blockIdx: part, eight experts, tile of tokens.
template <int kSlots>
__global__ void __launch_bounds__(kThreads, 1)
    route_tokens_by_blocks(const __grid_constant__ RouteTokensParams params) {
  const auto part = static_cast<int32_t>(blockIdx.x), tile = static_cast<int32_t>(blockIdx.z);
  const auto expert = static_cast<int32_t>(blockIdx.y * kWarps + threadIdx.x / kWarp);
  const bool exists = expert < params.partial.E;
  const bool several_tiles = gridDim.z > 1;
  const int32_t first = tile * kTileTokens, end = min(first + kTileTokens, params.partial.T);
  const Arrivals of_tile = params.arrivals(tile), of_all = params.arrivals(kMaxTiles);

  if (exists) prefetch_weight(params.partial, expert, part);
  wait_for_previous();
  if (threadIdx.x == 0) {
    of_tile.open();
    if (several_tiles) of_all.open();
  }
  if (exists) add_part_of_any(params.partial, expert, part, first, end);
  if (!of_tile.is_last(gridDim.x * gridDim.y)) return;
  choose_tokens<kSlots>(params, first, end);
  if (several_tiles && !of_all.is_last(gridDim.z)) return;
  __syncthreads();  // all pairs are there
  route_pairs<kThreads, kSlots * kWarp>(params.pairs);
}

// ---------------------------------------------------------------- host

struct TokenScratch {
  Counter* counters;
  int32_t* ids;   // (T, K)
  float* scores;  // (T, K)
  float* partial;

  TokenScratch(const tilemoe_routing_spec& spec, int64_t d, ScratchLayout& layout) {
    counters = layout.take<Counter>(kMaxTiles + 1);
    ids = layout.take<int32_t>(spec.pairs);
    scores = layout.take<float>(spec.pairs);
    partial = layout.take<float>(decode::parts_of(d) * spec.T * spec.E);
  }
};

Matrix matrix_of(const tilemoe_tensor& tensor) {
  const LogitRows rows = logit_rows(tensor);
  return {static_cast<const char*>(rows.data), rows.dtype, rows.row_bytes};
}

template <int kSlots>
void launch(const RouteTokensParams& params, cudaStream_t stream) {
  const auto tiles = static_cast<unsigned>((params.choice.T + kTileTokens - 1) / kTileTokens);
  const auto groups = static_cast<unsigned>((params.choice.E + kWarps - 1) / kWarps);
  const auto parts = static_cast<unsigned>(params.partial.parts);
  launch_pdl<route_tokens_by_blocks<kSlots>>({.device = current_device(),
                                              .blocks = dim3(parts, groups, std::max(tiles, 1u)),
                                              .threads = kThreads,
                                              .stream = stream},
                                             params);
}

}  // namespace

size_t route_tokens_scratch_bytes(const tilemoe_routing_spec& spec, int64_t d) {
  ScratchLayout layout(nullptr);
  const TokenScratch scratch(spec, d, layout);
  return layout.used();
}

void route_tokens(const tilemoe_routing& routing, const tilemoe_route_tokens_args& args) {
  const tilemoe_routing_spec& spec = routing.spec;
  const int64_t d = args.X.shape[1];
  const auto E = static_cast<int32_t>(spec.E);
  const bool biased = present(args.router_bias);
  ScratchLayout layout(args.workspace);
  const TokenScratch scratch(spec, d, layout);
  const auto T = static_cast<int32_t>(spec.T), K = static_cast<int32_t>(spec.K);
  const RouteTokensParams params{
      .partial = {.X = matrix_of(args.X),
                  .weight = matrix_of(args.router_weight),
                  .d = static_cast<int32_t>(d),
                  .parts = decode::parts_of(d),
                  .T = T,
                  .E = E,
                  .sums = scratch.partial},
      .bias = biased ? float_array(args.router_bias) : FloatArray{nullptr, TILEMOE_FLOAT32},
      .logits_dtype = args.logits_dtype,
      .logits = args.logits.data,
      .choice = {.logits = {},
                 .bias = static_cast<const float*>(args.selection_bias.data),
                 .ids = {scratch.ids, false},
                 .scores = scratch.scores,
                 .counts = nullptr,
                 .T = T,
                 .E = E,
                 .K = K,
                 .scoring = args.scoring,
                 .factor = args.routed_scaling_factor,
                 .groups = GroupLimit(args, E)},
      .pairs = {.ids = scratch.ids,
                .scores = scratch.scores,
                .T = T,
                .E = E,
                .K = K,
                .routing = routing,
                .expert_counts = static_cast<int32_t*>(args.expert_counts.data)},
      .counters = scratch.counters,
      .stamp = next_stamp()};
  const auto stream = static_cast<cudaStream_t>(args.stream);
  if (E <= 128)
    launch<4>(params, stream);
  else if (E <= 256)
    launch<8>(params, stream);
  else
    launch<16>(params, stream);
}

}  // namespace tilemoe::cuda
