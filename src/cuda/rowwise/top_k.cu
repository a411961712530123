// Top-K: each token's best experts and their scores. Usual sizes take a warp a token and stay in
// its registers; many experts take a warp that looks at its row piece by piece; any other size, and
// many experts in groups, take a block a token.
#include <algorithm>
#include <type_traits>

#include "check.h"
#include "cuda/core/device.h"
#include "cuda/core/launch_kernel.h"
#include "cuda/rowwise/block_choice.h"
#include "cuda/rowwise/float_types.h"
#include "cuda/rowwise/group_choice.h"
#include "cuda/rowwise/launch.h"
#include "cuda/rowwise/packed_choice.h"
#include "cuda/rowwise/routing.h"
#include "cuda/rowwise/warp_choice.h"
#include "cuda/rowwise/wide_choice.h"

namespace tilemoe::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kWarps = kThreads / kWarp;
constexpr int kMaxWarpExperts = 512;    // of a warp's choice: 16 registers a lane
constexpr int kMaxWideExperts = 16384;  // past it few tokens would leave the GPU idle
// A block's K stand in shared memory up to here, where a multiprocessor still takes three blocks;
// past it they are sorted where they are written.
constexpr int64_t kMaxSharedK = 8192;

struct TopKParams {
  LogitRows logits;   // (T, E)
  const float* bias;  // (E); null: none
  IntegerArray ids;   // (T, K)
  float* scores;      // (T, K)
  int32_t* counts;    // (E); null: not wanted
  int64_t T;
  int32_t E, K;
  tilemoe_scoring scoring;
  float factor;  // of every score
  GroupLimit groups;
};

// What a choice by sigmoid ranks by.
__device__ __forceinline__ float biased_sigmoid(const TopKParams& params, float logit, int64_t e) {
  const float value = order::sigmoid(logit);
  return params.bias == nullptr ? value : value + params.bias[e];
}

// The K shares of a sum; where all are 0 they share equally, as softmax does.
__device__ __forceinline__ float share(float value, float sum, int32_t K) {
  return sum > 0 ? value / sum : 1.f / static_cast<float>(K);
}

template <int kSlots>
__device__ __forceinline__ void rank_by_sigmoid(const TopKParams& params, WarpRow<kSlots>& row) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int32_t e = s * kWarp + lane_index();
    if (e < params.E) row.x[s] = biased_sigmoid(params, row.x[s], e);
  }
}

// Lane k's score. `best` is what it chose; sum_over_all(max) is asked for by that rule alone.
template <class SumOverAll>
__device__ __forceinline__ float score_by_warp(const TopKParams& params, const FloatArray& logits,
                                               const Chosen& best, bool nan,
                                               const SumOverAll& sum_over_all) {
  const bool chosen = lane_index() < params.K;
  float score = 0.f;
  if (ranks_by_sigmoid(params.scoring)) {
    if (chosen) score = order::sigmoid(logits.at(best.id));
    if (params.scoring == TILEMOE_SIGMOID_RENORMALIZED)
      score = share(score, sum_of_lanes(score), params.K);
  } else {
    const float max = __shfl_sync(kAllLanes, best.value, 0);
    if (chosen) score = order::softmax_weight(best.value, max);
    score /= params.scoring == TILEMOE_SOFTMAX_OVER_ALL ? sum_over_all(max) : sum_of_lanes(score);
  }
  return nan ? order::from_key(order::kNaNKey) : score * params.factor;
}

__device__ __forceinline__ void store_by_warp(const TopKParams& params, int64_t t, int32_t id,
                                              float score) {
  const int64_t pair = t * params.K + lane_index();
  params.ids.set(pair, id);
  params.scores[pair] = score;
}

// What is done to a row before its choice, where nothing limits it.
struct NoGroups {
  template <int kSlots>
  __device__ __forceinline__ void limit(WarpRow<kSlots>&) const {}
};

// Lane k < K gets the k-th best of token t and its score.
template <int kSlots, class Groups>
__device__ __forceinline__ void choose_by_warp(const TopKParams& params, const Groups& groups,
                                               int64_t t, int32_t& id, float& score) {
  const FloatArray logits = params.logits.row(t);
  WarpRow<kSlots> row;
  row.load(logits, params.E);
  const bool nan = row.any_nan();
  const bool by_sigmoid = ranks_by_sigmoid(params.scoring);
  if (by_sigmoid) rank_by_sigmoid(params, row);
  groups.limit(row);
  // With 16 slots a choice of either kind would take half more registers.
  const bool packs = kSlots <= 8 && !by_sigmoid && logits.dtype != TILEMOE_FLOAT32;
  const Chosen best = packs ? PackedChoice<kSlots>(row, params.E).choose(params.K)
                            : WarpChoice<kSlots>(row, params.E).choose(params.K);
  id = best.id;
  score = score_by_warp(params, logits, best, nan, [&](float max) {
    if (!std::is_same_v<Groups, NoGroups>) row.load(logits, params.E);
    return row.softmax_sum(params.E, max);
  });
}

// Blocks that a multiprocessor holds at once, by the registers that a row and its groups take.
template <int kSlots, bool kGroups>
constexpr int kBlocksAtOnce = kSlots <= 4   ? (kGroups ? 6 : 8)
                              : kSlots <= 8 ? (kGroups ? 4 : 5)
                                            : (kGroups ? 2 : 3);
// For 8.0 ptxas spills at so few registers, and gets those of fewer blocks.
#if __CUDA_ARCH__ >= 900
template <int kSlots, bool kGroups>
constexpr int kBlocksCompiledFor = kBlocksAtOnce<kSlots, kGroups>;
#else
template <int kSlots, bool kGroups>
constexpr int kBlocksCompiledFor = std::min(kBlocksAtOnce<kSlots, kGroups>, kSlots <= 4 ? 6 : 4);
#endif

template <int kSlots, bool kGroups>
__global__ void __launch_bounds__(kThreads, kBlocksCompiledFor<kSlots, kGroups>)
    top_k_by_warps(const TopKParams params) {
  using Groups = std::conditional_t<kGroups, WarpGroups<kSlots>, NoGroups>;
  __shared__ int32_t counts[kSlots * kWarp];
  for (int e = static_cast<int>(threadIdx.x); e < params.E; e += kThreads) counts[e] = 0;
  __syncthreads();
  const auto groups = [&] {
    if constexpr (kGroups) {
      __shared__ alignas(16) float rows[kWarps][WarpGroups<kSlots>::kSharedFloats];
      return Groups(params.groups, rows[threadIdx.x / kWarp]);
    } else {
      return Groups();
    }
  }();
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = blockIdx.x * kWarps + threadIdx.x / kWarp; t < params.T; t += stride) {
    int32_t id;
    float score;
    choose_by_warp<kSlots>(params, groups, t, id, score);
    if (lane_index() >= params.K) continue;
    store_by_warp(params, t, id, score);
    if (params.counts != nullptr) atomicAdd(&counts[id], 1);
  }
  if (params.counts == nullptr) return;
  __syncthreads();
  for (int e = static_cast<int>(threadIdx.x); e < params.E; e += kThreads)
    if (counts[e] != 0) atomicAdd(&params.counts[e], counts[e]);
}

// The row's type is known, so that a cell's loads are under way together.
template <class Logit>
__global__ void __launch_bounds__(kThreads, 3) top_k_by_wide_warps(const TopKParams params) {
  __shared__ WideChoice::Shared shared[kWarps];
  WideChoice::Shared& mine = shared[threadIdx.x / kWarp];
  const int64_t stride = static_cast<int64_t>(gridDim.x) * kWarps;
  for (int64_t t = blockIdx.x * kWarps + threadIdx.x / kWarp; t < params.T; t += stride) {
    const FloatArray logits = params.logits.row(t);
    const auto logit = [row = static_cast<const Logit*>(logits.data)](int32_t e) {
      return to_float(row[e]);
    };
    bool nan;
    const auto choose = [&](const auto& value) {
      return WideChoice::choose(mine, logit, value, params.E, params.K, nan);
    };
    const Chosen best =
        ranks_by_sigmoid(params.scoring)
            ? choose([&](float x, int32_t e) { return biased_sigmoid(params, x, e); })
            : choose([](float x, int32_t) { return x; });
    const float score = score_by_warp(params, logits, best, nan, [&](float max) {
      float sum = 0.f;
      for (int32_t e = lane_index(); e < params.E; e += kWarp)
        sum += order::softmax_weight(logit(e), max);
      return sum_of_lanes(sum);
    });
    if (lane_index() >= params.K) continue;
    store_by_warp(params, t, best.id, score);
    if (params.counts != nullptr) atomicAdd(&params.counts[best.id], 1);
  }
}

// sum over i of value(i) in the order of routing/order.h, in every thread of the block.
template <class Value>
__device__ float sum_by_first_warp(float& shared, int64_t count, const Value& value) {
  if (threadIdx.x < kWarp) {
    float lane = 0.f;
    for (int64_t i = threadIdx.x; i < count; i += kWarp) lane += value(i);
    lane = sum_of_lanes(lane);
    if (threadIdx.x == 0) shared = lane;
  }
  __syncthreads();
  return shared;
}

// values: on entry what each of the K was ranked by, on return its score.
__device__ void score_by_block(const TopKParams& params, const FloatArray& logits,
                               const IntegerArray& ids, float* values) {
  __shared__ float shared_sum;
  const int32_t E = params.E, K = params.K;
  const auto chosen = [&](int64_t k) { return values[k]; };
  if (ranks_by_sigmoid(params.scoring)) {
    for (int64_t k = threadIdx.x; k < K; k += kThreads)
      values[k] = order::sigmoid(logits.at(ids.at(k)));
    if (params.scoring == TILEMOE_SIGMOID) return;
    __syncthreads();
    const float sum = sum_by_first_warp(shared_sum, K, chosen);
    for (int64_t k = threadIdx.x; k < K; k += kThreads) values[k] = share(values[k], sum, K);
    return;
  }
  const float max = values[0];
  __syncthreads();  // it is overwritten below
  for (int64_t k = threadIdx.x; k < K; k += kThreads)
    values[k] = order::softmax_weight(values[k], max);
  __syncthreads();
  const auto weight = [&](int64_t e) { return order::softmax_weight(logits.at(e), max); };
  const float sum = params.scoring == TILEMOE_SOFTMAX_OVER_ALL
                        ? sum_by_first_warp(shared_sum, E, weight)
                        : sum_by_first_warp(shared_sum, K, chosen);
  for (int64_t k = threadIdx.x; k < K; k += kThreads) values[k] /= sum;
}

__global__ void __launch_bounds__(kThreads, 3) top_k_by_blocks(const TopKParams params) {
  using Choice = BlockChoice<kThreads>;
  using Groups = BlockGroups<kThreads>;
  __shared__ typename Choice::Shared shared;
  __shared__ typename Groups::Shared shared_groups;
  extern __shared__ float shared_values[];  // (K), then the ids (K)
  const int32_t E = params.E, K = params.K;
  for (int64_t t = blockIdx.x; t < params.T; t += gridDim.x) {
    const FloatArray logits = params.logits.row(t);
    const IntegerArray ids_out = params.ids.from(t * K);
    float* const scores_out = params.scores + t * K;
    const bool in_shared = K <= kMaxSharedK;
    float* const values = in_shared ? shared_values : scores_out;
    const IntegerArray ids = in_shared ? IntegerArray{shared_values + K, false} : ids_out;

    bool nan = false;
    for (int64_t e = threadIdx.x; e < E; e += kThreads)
      nan |= order::key(logits.at(e)) == order::kNaNKey;
    nan = __syncthreads_or(nan);
    const auto choose = [&](const auto& value) {
      if (params.groups.n_group == 1) return Choice::choose(shared, value, E, K, values, ids);
      const uint32_t best = Groups::best_groups(shared_groups, params.groups, value);
      Choice::choose(
          shared,
          [&](int32_t e) {
            const bool in_best = best >> e / params.groups.size & 1;
            return in_best ? value(e) : order::from_key(order::kNaNKey);
          },
          E, K, values, ids);
    };
    if (ranks_by_sigmoid(params.scoring))
      choose([&](int32_t e) { return biased_sigmoid(params, logits.at(e), e); });
    else
      choose([&](int32_t e) { return logits.at(e); });
    score_by_block(params, logits, ids, values);
    for (int64_t k = threadIdx.x; k < K; k += kThreads) {  // each thread its own
      const auto id = static_cast<int32_t>(ids.at(k));
      if (in_shared) ids_out.set(k, id);
      scores_out[k] = nan ? order::from_key(order::kNaNKey) : values[k] * params.factor;
      if (params.counts != nullptr) atomicAdd(&params.counts[id], 1);
    }
    __syncthreads();  // the next token's choice overwrites this one's
  }
}

// As many blocks as tokens take, or as a GPU holds at once where a multiprocessor holds `each`.
unsigned warp_blocks(const TopKParams& params, int64_t each) {
  return static_cast<unsigned>(
      std::min<int64_t>((params.T + kWarps - 1) / kWarps, current_device().multiprocessors * each));
}

template <int kSlots, bool kGroups>
void launch_warps(const TopKParams& params, cudaStream_t stream) {
  launch_kernel("top-K",
                {.blocks = warp_blocks(params, kBlocksAtOnce<kSlots, kGroups>),
                 .threads = kThreads,
                 .stream = stream},
                top_k_by_warps<kSlots, kGroups>, params);
}

template <int kSlots>
void launch_warps(const TopKParams& params, cudaStream_t stream) {
  if (params.groups.limits())
    launch_warps<kSlots, true>(params, stream);
  else
    launch_warps<kSlots, false>(params, stream);
}

void launch_wide_warps(const TopKParams& params, cudaStream_t stream) {
  with_float_type(params.logits.dtype, [&](auto logit) {
    launch_kernel("top-K",
                  {.blocks = warp_blocks(params, 3), .threads = kThreads, .stream = stream},
                  top_k_by_wide_warps<typename decltype(logit)::Type>, params);
  });
}

void launch_blocks(const TopKParams& params, cudaStream_t stream) {
  constexpr int kBytesEach = sizeof(float) + sizeof(int32_t);
  allow_shared_memory<top_k_by_blocks, kMaxSharedK * kBytesEach>();
  const int64_t bytes = params.K <= kMaxSharedK ? params.K * kBytesEach : 0;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(params.T, INT32_MAX));
  launch_kernel("top-K",
                {.blocks = blocks, .threads = kThreads, .stream = stream, .shared_bytes = bytes},
                top_k_by_blocks, params);
}

}  // namespace

void top_k(const tilemoe_top_k_args& args) {
  const int64_t T = args.logits.shape[0], E = args.logits.shape[1];
  const auto stream = static_cast<cudaStream_t>(args.stream);
  const TopKParams params{.logits = logit_rows(args.logits),
                          .bias = static_cast<const float*>(args.selection_bias.data),
                          .ids = integer_array(args.ids),
                          .scores = static_cast<float*>(args.scores.data),
                          .counts = static_cast<int32_t*>(args.expert_counts.data),
                          .T = T,
                          .E = static_cast<int32_t>(E),
                          .K = static_cast<int32_t>(args.K),
                          .scoring = args.scoring,
                          .factor = args.routed_scaling_factor,
                          .groups = GroupLimit(args, static_cast<int32_t>(E))};
  if (params.counts != nullptr)
    TILEMOE_CHECK_CUDA(
        cudaMemsetAsync(params.counts, 0, static_cast<size_t>(E) * sizeof(int32_t), stream),
        "top-K: " << E << " counts");
  if (T == 0) return;
  const bool many_in_groups = E > kMaxWarpExperts && params.groups.limits();
  if (E > kMaxWideExperts || args.K > kWarp || many_in_groups)
    launch_blocks(params, stream);
  else if (E > kMaxWarpExperts)
    launch_wide_warps(params, stream);
  else if (E <= 32)
    launch_warps<1>(params, stream);
  else if (E <= 64)
    launch_warps<2>(params, stream);
  else if (E <= 128)
    launch_warps<4>(params, stream);
  else if (E <= 256)
    launch_warps<8>(params, stream);
  else
    launch_warps<16>(params, stream);
}

}  // namespace tilemoe::cuda
