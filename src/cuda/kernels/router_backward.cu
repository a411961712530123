// From the scores' gradient to the logits'. A token's pairs are few and are added into a window of
// its row in shared memory; what a softmax over all takes from every expert is added when the
// window is written, so a gradient is rounded once. If the pairs of a token alone determine its
// gradient, a warp has several tokens, else one.
#include <algorithm>

#include "core/check.h"
#include "cuda/core/device.h"
#include "cuda/core/launch.h"
#include "cuda/kernels/kernels.h"
#include "cuda/kernels/round.h"
#include "cuda/kernels/router.h"
#include "cuda/kernels/warp_choice.h"
#include "routing/order.h"
#include "routing/spec.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kWindow = 1024;       // experts: 4 KiB a warp leaves room for all warps of an SM
constexpr int kTokensWindow = 512;  // of all tokens of a warp

// Writes a token's gradient, one window of experts after another. The window gets the sums of
// of_pair(pair) over the pairs of each expert; of_expert(expert, sum) is the expert's gradient.
template <class Out, class OfPair, class OfExpert>
__device__ void write_row(const BackwardParams& params, const TokenPairs& pairs, int64_t t,
                          float* window, const OfPair& of_pair, const OfExpert& of_expert) {
  Out* out = static_cast<Out*>(params.dlogits) + t * params.dlogits_stride;
  for (int64_t first = 0; first < params.E; first += kWindow) {
    const int64_t end = min(params.E, first + kWindow);
    for (int64_t e = first + lane_index(); e < end; e += kWarp) window[e - first] = 0.f;
    __syncwarp();
    pairs.each([&](const Pair& pair) {
      const bool inside = pair.expert >= first && pair.expert < first + kWindow;
      add_to_window(window, inside ? pair.expert - static_cast<int32_t>(first) : -1,
                    inside ? of_pair(pair) : 0.f);
    });
    for (int64_t e = first + lane_index(); e < end; e += kWarp) {
      const float gradient = of_expert(static_cast<int32_t>(e), window[e - first]);
      store(params.accumulate ? to_float(out[e]) + gradient : gradient, out[e]);
    }
  }
}

// Sum of s ds over the token's pairs that `counts` takes.
template <class Counts>
__device__ float dot_of(const TokenPairs& pairs, const Counts& counts) {
  float dot = 0.f;
  pairs.each([&](const Pair& pair) {
    if (pair.expert >= 0 && counts(pair.expert)) dot += pair.s * pair.ds;
  });
  return sum_of_lanes(dot);
}

// Token rounding: s is a share of the K chosen where the token chose the expert, whether it was
// kept or not, and a share of all E where it was added.
template <class Logit, class Out>
__device__ void rounded_row(const BackwardParams& params, const TokenPairs& pairs, const Logit* row,
                            int64_t t, float* window) {
  const auto softmax = TokenSoftmax::of(row, params.E, params.chosen + t * params.K, params.K);
  const auto chosen = [&](int32_t e) { return softmax.chose(e, order::key(to_float(row[e]))); };
  bool any_added = false;
  pairs.each([&](const Pair& pair) { any_added |= pair.expert >= 0 && !chosen(pair.expert); });
  any_added = __any_sync(kAllLanes, any_added);
  const float chosen_dot = dot_of(pairs, chosen);
  const float added_dot = dot_of(pairs, [&](int32_t e) { return !chosen(e); });
  write_row<Out>(
      params, pairs, t, window,
      [&](const Pair& pair) { return chosen(pair.expert) ? pair.ds : pair.s * pair.ds; },
      [&](int32_t e, float sum) {
        const float weight = softmax.weight(to_float(row[e]));
        float gradient = chosen(e) ? weight / softmax.chosen_sum * (sum - chosen_dot) : sum;
        if (any_added) gradient -= weight / softmax.sum * added_dot;
        return gradient;
      });
}

// A pair's term of its expert's logit gradient; `dot` is the sum of s ds over the token's pairs. Every s
// has the factor in it, which the gradient of a share of a sum sees once, as s, and not twice, as s
// in the sum of all.
template <class Logit>
__device__ float pair_gradient(const BackwardParams& params, const Pair& pair, float dot,
                               const Logit* row) {
  switch (params.scoring) {
    case TILEMOE_SOFTMAX_OVER_CHOSEN:
    case TILEMOE_SOFTMAX_RENORMALIZED: return pair.s * (pair.ds - dot / params.factor);
    case TILEMOE_SOFTMAX_OVER_ALL: return pair.s * pair.ds;
    case TILEMOE_SIGMOID: {
      const float x = to_float(row[pair.expert]);
      return order::sigmoid(x) * order::sigmoid(-x) * (params.factor * pair.ds);
    }
    case TILEMOE_SIGMOID_RENORMALIZED:
      return pair.s * order::sigmoid(-to_float(row[pair.expert])) * (pair.ds - dot / params.factor);
  }
  return 0.f;
}

template <class Logit, class Out>
__device__ void top_k_row(const BackwardParams& params, const TokenPairs& pairs, const Logit* row,
                          int64_t t, float* window) {
  const float dot = dot_of(pairs, [](int32_t) { return true; });
  const auto write = [&](const auto& of_expert) {
    write_row<Out>(
        params, pairs, t, window,
        [&](const Pair& pair) { return pair_gradient(params, pair, dot, row); }, of_expert);
  };
  if (params.scoring != TILEMOE_SOFTMAX_OVER_ALL)
    return write([](int32_t, float sum) { return sum; });
  const float max = largest_logit(row, params.E);
  const float scale = -dot / softmax_sum(row, params.E, max);
  write([&](int32_t e, float sum) {
    return order::softmax_weight(to_float(row[e]), max) * scale + sum;
  });
}

template <class Logit, class Out>
__global__ void __launch_bounds__(kThreads, 4) backward_rows(const BackwardParams params) {
  __shared__ float windows[kWarps][kWindow];
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  const int64_t t = int64_t{blockIdx.x} * kWarps + warp;
  if (t >= params.T) return;
  const TokenPairs pairs(params, t);
  const Logit* row = static_cast<const Logit*>(params.logits) + t * params.logits_stride;
  if (params.rounded)
    rounded_row<Logit, Out>(params, pairs, row, t, windows[warp]);
  else
    top_k_row<Logit, Out>(params, pairs, row, t, windows[warp]);
}

// How a warp of backward_groups is divided among tokens.
struct Group {
  int32_t lanes;   // of a token: a power of two, at least K
  int32_t tokens;  // of the warp; 0 if the pairs of a token alone do not determine its gradient

  explicit Group(const BackwardParams& params) : lanes(1), tokens(0) {
    const bool pairs_suffice = !params.rounded && params.scoring != TILEMOE_SOFTMAX_OVER_ALL;
    if (!pairs_suffice || params.token_offsets != nullptr || params.K > kWarp) return;
    while (lanes < params.K) lanes *= 2;
    tokens = static_cast<int32_t>(std::min<int64_t>(kWarp / lanes, kTokensWindow / params.E));
  }
};

// A lane a pair. Sums over a token's lanes are in the order of sums over a warp's.
template <class Logit, class Out>
__global__ void __launch_bounds__(kThreads, 6)
    backward_groups(const BackwardParams params, const int32_t lanes, const int32_t tokens) {
  __shared__ float windows[kWarps][kTokensWindow];
  const auto warp = static_cast<int>(threadIdx.x) / kWarp;
  float* const window = windows[warp];
  const auto E = static_cast<int32_t>(params.E);
  const int64_t first_token = (int64_t{blockIdx.x} * kWarps + warp) * tokens;
  const auto here = static_cast<int32_t>(min(int64_t{tokens}, params.T - first_token));
  if (here <= 0) return;
  const int32_t token = lane_index() / lanes, k = lane_index() % lanes;
  const int64_t t = first_token + token;

  for (int32_t i = lane_index(); i < here * E; i += kWarp) window[i] = 0.f;
  Pair pair{-1, 0.f, 0.f};
  if (token < here && k < params.K) {
    const int32_t row = params.pair_row[t * params.K + k];
    if (row >= 0)
      pair = {expert_of_row(params.offsets, E, row), params.row_score[row],
              params.ds[t * params.K + k]};
  }
  float dot = pair.s * pair.ds;
  for (int32_t half = lanes / 2; half > 0; half /= 2) dot += __shfl_xor_sync(kAllLanes, dot, half);
  const Logit* const row = static_cast<const Logit*>(params.logits) + t * params.logits_stride;
  __syncwarp();
  const bool exists = pair.expert >= 0;
  add_to_window(window, exists ? token * E + pair.expert : -1,
                exists ? pair_gradient(params, pair, dot, row) : 0.f);

  for (int32_t i = 0; i < here; ++i) {
    Out* out = static_cast<Out*>(params.dlogits) + (first_token + i) * params.dlogits_stride;
    for (int32_t e = lane_index(); e < E; e += kWarp) {
      const float gradient = window[i * E + e];
      store(params.accumulate ? to_float(out[e]) + gradient : gradient, out[e]);
    }
  }
}

// Token rounding: the choice is made again. Its scores are a by-product.
struct BackwardScratch {
  int32_t* ids;   // (T, K)
  float* scores;  // (T, K)

  BackwardScratch(const tilemoe_routing_spec& spec, ScratchLayout& layout) {
    const int64_t chosen = spec.kind == TILEMOE_ROUTING_ROUNDED ? spec.T * spec.K : 0;
    ids = layout.take<int32_t>(chosen);
    scores = layout.take<float>(chosen);
  }
};

}  // namespace

size_t router_backward_scratch_bytes(const tilemoe_routing_spec& spec) {
  ScratchLayout layout(nullptr);
  BackwardScratch(spec, layout);
  return layout.used();
}

void router_backward(const tilemoe_router_backward_args& args) {
  const tilemoe_routing& routing = *args.routing;
  const tilemoe_routing_spec& spec = routing.spec;
  if (spec.T == 0) return;
  ScratchLayout layout(args.workspace);
  const BackwardScratch scratch(spec, layout);
  const bool rounded = spec.kind == TILEMOE_ROUTING_ROUNDED;
  if (rounded)
    top_k(choice_args(args.logits, spec.K, scratch.ids, scratch.scores, nullptr, args.stream));
  const BackwardParams params{.scoring = args.scoring,
                              .factor = args.routed_scaling_factor,
                              .rounded = rounded,
                              .T = spec.T,
                              .E = spec.E,
                              .K = spec.K,
                              .offsets = routing.offsets,
                              .row_score = routing.row_score,
                              .pair_row = routing.pair_row,
                              .token_offsets = routing.token_offsets,
                              .ds = static_cast<const float*>(args.ds.data),
                              .logits = args.logits.data,
                              .logits_stride = args.logits.stride[0],
                              .chosen = scratch.ids,
                              .dlogits = args.dlogits.data,
                              .dlogits_stride = args.dlogits.stride[0],
                              .accumulate = args.accumulate != 0};
  const Group group(params);
  const tilemoe_dtype logits = present(args.logits) ? args.logits.dtype : args.dlogits.dtype;
  with_gradient_types(logits, args.dlogits.dtype, [&]<class Logit, class Out>() {
    const auto stream = static_cast<cudaStream_t>(args.stream);
    const auto blocks = [&](int64_t tokens_a_warp) {
      return static_cast<unsigned>((spec.T + kWarps * tokens_a_warp - 1) /
                                   (kWarps * tokens_a_warp));
    };
    const KernelLaunch where{
        .blocks = blocks(std::max(group.tokens, 1)), .threads = kThreads, .stream = stream};
    if (group.tokens > 1)
      launch_kernel("router backward", where, backward_groups<Logit, Out>, params, group.lanes,
                    group.tokens);
    else
      launch_kernel("router backward", where, backward_rows<Logit, Out>, params);
  });
}

}  // namespace tilemoe::cuda
