// Token rounding's first step: each token's top K, and every expert's weight for it, stored by
// expert. Usual sizes take a warp a token, whose logits are read once and whose weights stay in its
// registers. Any other size takes top-K first, and then weighs what it chose.
#include "cuda/core/launch.h"
#include "cuda/kernels/arrays.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/round.h"
#include "cuda/kernels/warp_choice.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda {
namespace {

constexpr int kWarps = 8;
constexpr int kThreads = kWarps * kWarp;
constexpr int kTokensPerWarp = kWordTokens / kWarps;
constexpr int kMaxWarpExperts = 512;  // 16 registers a lane, and 66 KiB of shared memory a block

struct WeighParams {
  LogitRows logits;  // (T, E)
  int32_t E, K;
  RoundScratch scratch;
};

// The results of a CTA, token by token, before they are stored expert by expert.
using TileRow = uint32_t[kWordTokens + 1];  // the last is for the banks

// Stores the codes of experts [e0, e0 + count) with lane = token.
__device__ __forceinline__ void store_codes(const WeighParams& params, const TileRow* tile,
                                            int64_t e0, int count) {
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t stride = params.scratch.code_stride();
  uint32_t* const codes =
      params.scratch.codes + e0 * stride + int64_t{blockIdx.x} * kWordTokens + lane_index();
#pragma unroll 4
  for (int column = warp; column < count; column += kWarps)
    codes[column * stride] = tile[column][lane_index()];
}

// Adds a tile's choices to the counts of experts [e0, e0 + count).
__device__ __forceinline__ void count_chosen(const WeighParams& params, const TileRow* tile,
                                             int64_t e0, int count, uint32_t group) {
  for (int column = static_cast<int>(threadIdx.x); column < count; column += kThreads) {
    int32_t chosen = 0;
#pragma unroll
    for (int token = 0; token < kWordTokens; ++token)
      chosen += WeightCode::chosen(tile[column][token]) ? 1 : 0;
    if (chosen != 0)
      atomicAdd(&params.scratch.counts[params.scratch.place(e0 + column, group)], chosen);
  }
}

// ------------------------------------------------------------ choice and weights by a warp

// The codes of token t into column `token` of the tile; returns whether it has a NaN logit.
template <int kSlots>
__device__ __forceinline__ bool weigh(const WeighParams& params, WarpRow<kSlots>& row, int64_t t,
                                      int token, TileRow* tile) {
  WarpChoice<kSlots> choice(row, params.E);
  const Chosen best = choice.choose(params.K);
  const float max = __shfl_sync(kAllLanes, best.value, 0);
  const bool chosen = lane_index() < params.K;
  const float sum = row.to_softmax_weights(params.E, max);  // a NaN weighs NaN
  float chosen_sum = sum_of_lanes(chosen ? order::softmax_weight(best.value, max) : 0.f);
  if (sum != sum) chosen_sum = sum;
  if (chosen) params.scratch.ids[t * params.K + lane_index()] = best.id;
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int32_t e = s * kWarp + lane_index();
    const bool is_chosen = (choice.chosen_slots() >> s & 1) != 0;
    const float share = row.x[s] / (is_chosen ? chosen_sum : sum);
    if (e < params.E) tile[e][token] = WeightCode::of(share, is_chosen);
  }
  return sum != sum;
}

// A CTA takes 32 tokens, a warp four of them one by one.
template <int kSlots>
__global__ void __launch_bounds__(kThreads, kSlots > 8 ? 2 : 3)
    choose_and_weigh(const WeighParams params) {
  TILEMOE_DYNAMIC_SHARED(TileRow, tile, alignof(TileRow));  // (E)
  __shared__ int32_t nan_tokens;
  wait_for_previous();  // (a memset comes before, which no kernel overlaps; the next one may start)
  const int warp = static_cast<int>(threadIdx.x) / kWarp;
  const WordTokens word = params.scratch.tokens_of(blockIdx.x);
  const int64_t t0 = word.first;
  const int tokens = word.count;
  if (threadIdx.x == 0) nan_tokens = 0;
  __syncthreads();

  // The next token's logits are under way while one is weighed; past the last it is repeated.
  const auto logits_of = [&](int token) { return params.logits.row(t0 + min(token, tokens - 1)); };
  WarpRow<kSlots> next;
  next.load(logits_of(warp), params.E);
#pragma unroll 1
  for (int token = warp; token < kWordTokens; token += kWarps) {
    WarpRow<kSlots> row = next;
    next.load(logits_of(token + kWarps), params.E);
    if (token < tokens) {
      const bool nan = weigh(params, row, t0 + token, token, tile);
      if (nan && lane_index() == 0) atomicAdd(&nan_tokens, 1);
    } else {
      for (int e = lane_index(); e < params.E; e += kWarp) tile[e][token] = WeightCode::kNone;
    }
  }
  __syncthreads();

  store_codes(params, tile, 0, params.E);
  count_chosen(params, tile, 0, params.E, word.group);
  if (threadIdx.x == 0) params.scratch.nan_tokens[blockIdx.x] = nan_tokens;
}

template <int kSlots>
void launch_warps(const DeviceInfo& device, const WeighParams& params, cudaStream_t stream) {
  allow_shared_memory<choose_and_weigh<kSlots>, kSlots * kWarp * sizeof(TileRow)>(device);
  launch_pdl<choose_and_weigh<kSlots>>(
      {.device = device,
       .blocks = static_cast<unsigned>(params.scratch.words),
       .threads = kThreads,
       .stream = stream,
       .shared_bytes = params.E * static_cast<int>(sizeof(TileRow))},
      params);
}

// ------------------------------------------------------------ weights of what top-K chose

constexpr int kTileExperts = 256;

// A CTA takes 32 tokens, a warp four of them together.
template <class Logit>
__global__ void __launch_bounds__(kThreads, 3) weigh_chosen(const WeighParams params) {
  __shared__ TileRow tile[kTileExperts];
  __shared__ int32_t nan_tokens;
  wait_for_previous();
  const int64_t E = params.E, K = params.K;
  const WordTokens word = params.scratch.tokens_of(blockIdx.x);
  const int warp = static_cast<int>(threadIdx.x) / kWarp, lane = lane_index();
  if (threadIdx.x == 0) nan_tokens = 0;
  __syncthreads();

  // Tokens past the last repeat it, so that four are always under way together.
  const Logit* rows[kTokensPerWarp];
  TokenSoftmax tokens[kTokensPerWarp];
#pragma unroll
  for (int i = 0; i < kTokensPerWarp; ++i) {
    const int64_t t = word.first + min(warp * kTokensPerWarp + i, word.count - 1);
    rows[i] = static_cast<const Logit*>(params.logits.row(t).data);
    tokens[i] = TokenSoftmax::of(rows[i], E, params.scratch.ids + t * K, K);
  }
#pragma unroll
  for (int i = 0; i < kTokensPerWarp; ++i)
    if (lane == 0 && tokens[i].sum != tokens[i].sum && warp * kTokensPerWarp + i < word.count)
      atomicAdd(&nan_tokens, 1);

  for (int64_t e0 = 0; e0 < E; e0 += kTileExperts) {
    const auto experts = static_cast<int>(min(int64_t{kTileExperts}, E - e0));
    for (int column = lane; column < experts; column += kWarp) {
      const auto e = static_cast<int32_t>(e0 + column);
#pragma unroll
      for (int i = 0; i < kTokensPerWarp; ++i) {
        const float logit = to_float(rows[i][e]);
        const bool chosen = tokens[i].chose(e, order::key(logit));
        const float sum = chosen ? tokens[i].chosen_sum : tokens[i].sum;
        const int token = warp * kTokensPerWarp + i;
        tile[column][token] = token < word.count
                                  ? WeightCode::of(tokens[i].weight(logit) / sum, chosen)
                                  : WeightCode::kNone;
      }
    }
    __syncthreads();
    store_codes(params, tile, e0, experts);
    if (params.scratch.several_groups()) count_chosen(params, tile, e0, experts, word.group);
    __syncthreads();
  }
  if (threadIdx.x == 0) params.scratch.nan_tokens[blockIdx.x] = nan_tokens;
}

}  // namespace

void weigh_tokens(const DeviceInfo& device, const tilemoe_tensor& logits, int64_t K,
                  const RoundScratch& scratch, void* stream) {
  const int64_t T = logits.shape[0], E = logits.shape[1];
  const auto on = static_cast<cudaStream_t>(stream);
  const WeighParams params{.logits = logit_rows(logits),
                           .E = static_cast<int32_t>(E),
                           .K = static_cast<int32_t>(K),
                           .scratch = scratch};
  // Top-K counts for all tokens together.
  const bool by_top_k = T == 0 || E > kMaxWarpExperts || K > kWarp;
  const bool top_k_counts = by_top_k && !scratch.several_groups();
  if (!top_k_counts)
    TILEMOE_CHECK_CUDA(
        cudaMemsetAsync(scratch.counts, 0, scratch.zeroed_bytes, on),
        "token rounding: " << E << " counts of " << scratch.groups.count << " groups");
  if (by_top_k) {
    top_k(device, choice_args(logits, K, scratch.ids, scratch.scores,
                              top_k_counts ? scratch.counts : nullptr, stream));
    if (T == 0) return;
    return with_float(logits.dtype, [&]<class Logit>() {
      launch_pdl<weigh_chosen<Logit>>({.device = device,
                                       .blocks = static_cast<unsigned>(scratch.words),
                                       .threads = kThreads,
                                       .stream = on},
                                      params);
    });
  }
  if (E <= 32)
    launch_warps<1>(device, params, on);
  else if (E <= 64)
    launch_warps<2>(device, params, on);
  else if (E <= 128)
    launch_warps<4>(device, params, on);
  else if (E <= 256)
    launch_warps<8>(device, params, on);
  else
    launch_warps<16>(device, params, on);
}

}  // namespace tilemoe::cuda
