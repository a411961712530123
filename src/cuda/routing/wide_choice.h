// A token's choice by one warp, from a row that does not fit its registers. The row is read once,
// and of every lane's numbers the best of each cell is kept. At least K numbers reach the K-th best
// of the lanes' bests, and in most rows few more: cells that reach it are looked at again, and the
// K are chosen from what is found there. Of 4096 independent numbers K = 8 leaves about 9.
#pragma once

#include <cstdint>

#include "cuda/routing/warp_choice.h"

namespace tilemoe::cuda {

class WideChoice {
 public:
  static constexpr int kCell = kWarp;           // numbers of one lane, kWarp apart
  static constexpr int kGroup = kCell * kWarp;  // a cell of every lane: read together
  static constexpr int kMaxGroups = 16;
  static constexpr int kMaxExperts = kMaxGroups * kGroup;

  // Of a warp.
  struct Shared {
    uint64_t candidates[4 * kWarp];  // ranks, in any order
    float best[kMaxGroups][kWarp];   // of each cell; NaN where it has no number
  };

  // Greatest first, ties to the lower id, NaN last; lane k < K returns the k-th best of
  // value(logit(e), e), e in [0, E). 32 <= E <= kMaxExperts, K <= 32. `nan` tells whether a logit
  // is.
  template <class Logit, class Value>
  __device__ static Chosen choose(Shared& shared, const Logit& logit, const Value& value, int32_t E,
                                  int32_t K, bool& nan) {
    const int32_t bound = bound_of_cells(shared, logit, value, E, K, nan);
    uint64_t last = order::rank(bound, INT32_MAX);  // what ranks behind it is not among the K
    int count = 0;
    for (int32_t e0 = 0; e0 < E; e0 += kGroup) {
      unsigned lanes = __ballot_sync(
          kAllLanes, order::key(shared.best[e0 / kGroup][lane_index()]) >= order::rank_key(last));
      for (; lanes != 0; lanes &= lanes - 1) {  // one cell, by all lanes
        const int32_t e = e0 + lane_index() * kWarp + __ffs(static_cast<int>(lanes)) - 1;
        const uint64_t rank = e < E ? order::rank(order::key(value(logit(e), e)), e) : kNone;
        const bool reaches = rank <= last;
        const unsigned found = __ballot_sync(kAllLanes, reaches);
        const int place = count + __popc(found & ((1u << lane_index()) - 1));
        if (reaches) shared.candidates[place] = rank;
        count += __popc(found);
        if (count <= kMostCandidates - kWarp) continue;
        const uint64_t best = best_candidates(shared, count, K);
        last = __shfl_sync(kAllLanes, best, K - 1);
        if (lane_index() < K) shared.candidates[lane_index()] = best;
        count = K;
      }
    }
    const uint64_t best = best_candidates(shared, count, K);
    return {order::from_key(order::rank_key(best)), order::rank_index(best)};
  }

 private:
  static constexpr int kSlots = 4;
  static constexpr int kMostCandidates = kSlots * kWarp;
  static constexpr uint64_t kNone = ~uint64_t{0};  // no number's rank

  // Fills shared.best; returns the key of the K-th best of the lanes' bests.
  template <class Logit, class Value>
  __device__ static int32_t bound_of_cells(Shared& shared, const Logit& logit, const Value& value,
                                           int32_t E, int32_t K, bool& nan) {
    const float none = order::from_key(order::kNaNKey);  // fmaxf leaves a NaN out
    float lane_best = none;
    bool lane_nan = false;
    for (int32_t e0 = 0; e0 < E; e0 += kGroup) {
      float x[kCell];  // loaded before any is looked at
#pragma unroll
      for (int i = 0; i < kCell; ++i) {
        const int32_t e = e0 + i * kWarp + lane_index();
        x[i] = e < E ? logit(e) : 0.f;
      }
      float best = none;
#pragma unroll
      for (int i = 0; i < kCell; ++i) {
        const int32_t e = e0 + i * kWarp + lane_index();
        lane_nan |= x[i] != x[i];
        best = fmaxf(best, e < E ? value(x[i], e) : none);
      }
      shared.best[e0 / kGroup][lane_index()] = best;
      lane_best = fmaxf(lane_best, best);
    }
    nan = __any_sync(kAllLanes, lane_nan);
    int32_t key = order::key(lane_best), bound = 0;
    for (int32_t wanted = K; wanted > 0;) {
      bound = __reduce_max_sync(kAllLanes, key);
      wanted -= __popc(__ballot_sync(kAllLanes, key == bound));
      if (key == bound) key = order::kNaNKey;
    }
    return bound;
  }

  // Lane k < K gets the k-th of the candidates. K <= count.
  __device__ static uint64_t best_candidates(const Shared& shared, int count, int32_t K) {
    __syncwarp();  // all have been written,
    uint64_t mine[kSlots], best = kNone;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int place = s * kWarp + lane_index();
      mine[s] = place < count ? shared.candidates[place] : kNone;
    }
    __syncwarp();  // and may be overwritten
#pragma unroll
    for (int end = 1; end < kSlots; ++end)
#pragma unroll
      for (int s = end; s > 0; --s) {
        const uint64_t a = mine[s - 1], b = mine[s];
        mine[s - 1] = min(a, b), mine[s] = max(a, b);
      }
    for (int32_t k = 0; k < K; ++k) {
      const auto high = static_cast<uint32_t>(mine[0] >> 32), low = static_cast<uint32_t>(mine[0]);
      const uint32_t first = __reduce_min_sync(kAllLanes, high);
      const uint32_t id = __reduce_min_sync(kAllLanes, high == first ? low : ~0u);
      if (lane_index() == k) best = uint64_t{first} << 32 | id;
      if (high != first || low != id) continue;
#pragma unroll
      for (int s = 1; s < kSlots; ++s) mine[s - 1] = mine[s];
      mine[kSlots - 1] = kNone;
    }
    return best;
  }
};

}  // namespace tilemoe::cuda
