// Top-K: the choice by a CTA, the parameters of the kernels, and the choice by a warp or by a CTA.
#pragma once

#include <algorithm>
#include <cstdint>
#include <type_traits>

#include "cuda/core/launch.h"
#include "cuda/kernels/arrays.h"
#include "cuda/kernels/block.h"
#include "cuda/kernels/group_choice.h"
#include "cuda/kernels/warp_choice.h"
#include "cuda/ptx/warp.h"
#include "routing/order.h"

namespace tilemoe::cuda {

// A token's choice by a whole CTA, for any E and K: a radix select over (key, id) finds how far the
// chosen reach, they are gathered in any order, and a bitonic sort orders them. No two ranks are
// equal, so the result does not depend on the order in which threads arrive.
//
// Measured at E = 4096, K = 8 on an H100: keeping the row in shared memory between passes took 8 %
// less time in float32 and 17 % more in bfloat16, so each pass reads the row again.
template <int kThreads>
class BlockChoice {
 public:
  static constexpr int kBins = 256;  // a pass looks at a byte of the ranks
  static_assert(kThreads == kBins);

  struct Shared {
    int32_t bins[kBins];
    typename BlockScan<int32_t, Add, kThreads>::Shared scan;
    int32_t bin, before, within;  // where the K-th lies
    int32_t gathered;
  };

  // Of ranks, those whose leading bits are at most `prefix`.
  struct Reach {
    uint64_t prefix;
    int shift;

    __device__ bool holds(uint64_t rank) const { return rank >> shift <= prefix; }
  };

  // values, ids = the K best of value(e), e in [0, E), best first. Called by all threads.
  template <class Value>
  __device__ static void choose(Shared& shared, const Value& value, int32_t E, int32_t K,
                                float* values, const IntegerArray& ids) {
    const auto rank = [&](int32_t e) { return order::rank(order::key(value(e)), e); };
    const Reach reach = K < E ? select(shared, rank, E, K) : Reach{~uint64_t{0}, 0};
    if (threadIdx.x == 0) shared.gathered = 0;
    __syncthreads();
    for (int64_t e = threadIdx.x; e < E; e += kThreads) {
      const auto id = static_cast<int32_t>(e);
      if (!reach.holds(rank(id))) continue;
      const int32_t slot = atomicAdd(&shared.gathered, 1);
      values[slot] = value(id);
      ids.set(slot, id);
    }
    __syncthreads();
    sort(values, ids, K);
  }

 private:
  template <class Rank>
  __device__ static Reach select(Shared& shared, const Rank& rank, int32_t E, int32_t K) {
    Reach reach = {0, 64};
    int32_t wanted = K;
    while (reach.shift > 0) {
      const int above = reach.shift;
      reach.shift -= 8;
      if (reach.shift < 32 && static_cast<uint32_t>(E - 1) >> reach.shift == 0) {
        reach.prefix <<= 8;  // no id has bits here
        continue;
      }
      shared.bins[threadIdx.x] = 0;
      __syncthreads();
      for (int64_t e = threadIdx.x; e < E; e += kThreads) {
        const uint64_t r = rank(static_cast<int32_t>(e));
        if (above == 64 || r >> above == reach.prefix)
          atomicAdd(&shared.bins[r >> reach.shift & (kBins - 1)], 1);
      }
      __syncthreads();
      const int32_t count = shared.bins[threadIdx.x];
      const int32_t end = BlockScan<int32_t, Add, kThreads>::scan(shared.scan, count).inclusive;
      if (end - count < wanted && wanted <= end) {
        shared.bin = static_cast<int32_t>(threadIdx.x);
        shared.before = end - count, shared.within = count;
      }
      __syncthreads();
      reach.prefix = reach.prefix << 8 | static_cast<uint32_t>(shared.bin);
      wanted -= shared.before;
      if (wanted == shared.within) break;  // the whole bin is chosen
    }
    return reach;
  }

  // A bitonic network in which the better always goes to the lower place: what lies past K would
  // be worst of all and stay there, so K may be any number.
  __device__ static void sort(float* values, const IntegerArray& ids, int64_t K) {
    for (int64_t width = 2; width / 2 < K; width *= 2)
      for (int64_t step = width; step > 1; step /= 2) {
        const int64_t half = step / 2;
        for (int64_t i = threadIdx.x; i < (K + step - 1) / step * half; i += kThreads) {
          const int64_t base = i / half * step, j = i % half;
          const int64_t a = base + j, b = base + (step == width ? step - 1 - j : j + half);
          if (b < K) put_in_order(values, ids, a, b);
        }
        __syncthreads();
      }
  }
  __device__ static void put_in_order(float* values, const IntegerArray& ids, int64_t a,
                                      int64_t b) {
    const float x = values[a], y = values[b];
    const auto id_x = static_cast<int32_t>(ids.at(a)), id_y = static_cast<int32_t>(ids.at(b));
    if (order::rank(order::key(x), id_x) < order::rank(order::key(y), id_y)) return;
    values[a] = y, values[b] = x;
    ids.set(a, id_y), ids.set(b, id_x);
  }
};

// The parameters of the top-K kernels.
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

// The value by which a choice by sigmoid ranks.
__device__ __forceinline__ float biased_sigmoid(const TopKParams& params, float logit, int64_t e) {
  const float value = order::sigmoid(logit);
  return params.bias == nullptr ? value : value + params.bias[e];
}

// A token's top-K by one warp: its experts and their scores, from a row that fits the warp's
// registers. Top-K and the routing of decode share this code.

template <int kSlots>
__device__ __forceinline__ void rank_by_sigmoid(const TopKParams& params, WarpRow<kSlots>& row) {
#pragma unroll
  for (int s = 0; s < kSlots; ++s) {
    const int32_t e = s * kWarp + lane_index();
    if (e < params.E) row.x[s] = biased_sigmoid(params, row.x[s], e);
  }
}

// Lane k's score. `best` is what it chose; only that rule calls sum_over_all(max).
template <class SumOverAll>
__device__ __forceinline__ float score_by_warp(const TopKParams& params, const FloatArray& logits,
                                               const Chosen& best, bool nan,
                                               const SumOverAll& sum_over_all) {
  const bool chosen = lane_index() < params.K;
  float score = 0.f;
  if (ranks_by_sigmoid(params.scoring)) {
    if (chosen) score = order::sigmoid(logits.at(best.id));
    if (params.scoring == TILEMOE_SIGMOID_RENORMALIZED)
      score = share_of(score, sum_of_lanes(score), params.K);
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

// The change of a row before its choice if nothing limits the choice.
struct NoGroups {
  template <int kSlots>
  __device__ __forceinline__ void limit(WarpRow<kSlots>&) const {}
};

// Lane k < K gets the k-th best of a token's logits (E) and its score.
template <int kSlots, class Groups>
__device__ __forceinline__ void choose_by_warp(const TopKParams& params, const Groups& groups,
                                               const FloatArray& logits, int32_t& id,
                                               float& score) {
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

// Top-K by one CTA per token: any E and K, and many experts in groups.

// Up to this K the choices of a CTA are in shared memory, and an SM still holds three CTAs; past it
// they are sorted in the output.
constexpr int64_t kMaxSharedK = 8192;

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
template <int kThreads>
__device__ void score_by_block(const TopKParams& params, const FloatArray& logits,
                               const IntegerArray& ids, float* values) {
  __shared__ float cta_sum;
  const int32_t E = params.E, K = params.K;
  const auto chosen = [&](int64_t k) { return values[k]; };
  if (ranks_by_sigmoid(params.scoring)) {
    for (int64_t k = threadIdx.x; k < K; k += kThreads)
      values[k] = order::sigmoid(logits.at(ids.at(k)));
    if (params.scoring == TILEMOE_SIGMOID) return;
    __syncthreads();
    const float sum = sum_by_first_warp(cta_sum, K, chosen);
    for (int64_t k = threadIdx.x; k < K; k += kThreads) values[k] = share_of(values[k], sum, K);
    return;
  }
  const float max = values[0];
  __syncthreads();  // it is overwritten below
  for (int64_t k = threadIdx.x; k < K; k += kThreads)
    values[k] = order::softmax_weight(values[k], max);
  __syncthreads();
  const auto weight = [&](int64_t e) { return order::softmax_weight(logits.at(e), max); };
  const float sum = params.scoring == TILEMOE_SOFTMAX_OVER_ALL
                        ? sum_by_first_warp(cta_sum, E, weight)
                        : sum_by_first_warp(cta_sum, K, chosen);
  for (int64_t k = threadIdx.x; k < K; k += kThreads) values[k] /= sum;
}

template <int kThreads>
__global__ void __launch_bounds__(kThreads, 3) top_k_by_blocks(const TopKParams params) {
  using Choice = BlockChoice<kThreads>;
  using Groups = BlockGroups<kThreads>;
  __shared__ typename Choice::Shared shared;
  __shared__ typename Groups::Shared shared_groups;
  TILEMOE_DYNAMIC_SHARED(float, shared_values, alignof(float));  // (K), then the ids (K)
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
    score_by_block<kThreads>(params, logits, ids, values);
    for (int64_t k = threadIdx.x; k < K; k += kThreads) {  // each thread its own
      const auto id = static_cast<int32_t>(ids.at(k));
      if (in_shared) ids_out.set(k, id);
      scores_out[k] = nan ? order::from_key(order::kNaNKey) : values[k] * params.factor;
      if (params.counts != nullptr) atomicAdd(&params.counts[id], 1);
    }
    __syncthreads();  // the next token's choice overwrites this one's (past 2^31 tokens: else a
                      // block has one)
  }
}

template <int kThreads>
void launch_top_k_by_blocks(const DeviceInfo& device, const TopKParams& params,
                            cudaStream_t stream) {
  constexpr int kBytesEach = sizeof(float) + sizeof(int32_t);
  allow_shared_memory<top_k_by_blocks<kThreads>, kMaxSharedK * kBytesEach>(device);
  const int64_t bytes = params.K <= kMaxSharedK ? params.K * kBytesEach : 0;
  const auto blocks = static_cast<unsigned>(std::min<int64_t>(params.T, INT32_MAX));
  launch_kernel("top-K",
                {.blocks = blocks, .threads = kThreads, .stream = stream, .shared_bytes = bytes},
                top_k_by_blocks<kThreads>, params);
}

}  // namespace tilemoe::cuda
