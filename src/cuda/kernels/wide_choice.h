// The greatest of many numbers without sorting them: a radix descent, some bits at a time.
#pragma once

#include <cstdint>

#include "cuda/kernels/block.h"
#include "cuda/kernels/warp_choice.h"

namespace tilemoe::cuda {

// The first `wanted` in descending order are those above `value`, and `ties` of those equal to it.
struct Threshold {
  uint32_t value;
  int32_t ties;
};

// Bits of a digit where a block selects, and so its threads: 1024 where few blocks have much to do,
// 256 where many have little. By reasoning: groups of tokens were not measured yet.
constexpr int kMuchBits = 10, kLittleBits = 8;

// By a CTA of kThreads threads, one for every bin of a digit.
template <int kBits>
class BlockSelect {
 public:
  static constexpr int kThreads = 1 << kBits;
  using Scan = BlockScan<int32_t, Add, kThreads>;

  struct Shared {
    typename Scan::Shared scan;
    int32_t bins[kThreads];
    int32_t bin, above;  // the digit of the threshold; how many have a greater one
  };

  // each(visit) calls visit(x) for this thread's share of the numbers, the same on every call;
  // x < 2^bits. 1 <= wanted <= their count.
  template <class Each>
  __device__ static Threshold select(Shared& shared, int32_t wanted, int bits, const Each& each) {
    uint32_t prefix = 0;
    for (int shift = (bits - 1) / kBits * kBits; shift >= 0; shift -= kBits) {
      shared.bins[threadIdx.x] = 0;
      __syncthreads();
      each([&](uint32_t x) {
        // A shift by 32 is no shift: at the top digit nothing is above it.
        if (shift + kBits < 32 && x >> (shift + kBits) != prefix) return;
        atomicAdd(&shared.bins[(x >> shift) % kThreads], 1);
      });
      __syncthreads();
      // Bins in descending order.
      const auto bin = static_cast<int32_t>(kThreads - 1 - threadIdx.x);
      const int32_t here = shared.bins[bin];
      const int32_t through = Scan::scan(shared.scan, here).inclusive;
      if (through >= wanted && through - here < wanted) {
        shared.bin = bin;
        shared.above = through - here;
      }
      __syncthreads();
      prefix = prefix << kBits | static_cast<uint32_t>(shared.bin);
      wanted -= shared.above;
    }
    return {prefix, wanted};
  }
};

// A token's choice by one warp, from a row that does not fit its registers. Of what a lane has seen
// it keeps the best. At least K numbers reach the K-th best of the lanes' bests, and in most rows
// few more: each stretch of the row is held against that bound while it is at hand, and the K are
// chosen from what reaches it. Of 4096 independent numbers K = 8 leaves about 20.
//
// To find the bound of the whole row first, and then to look again at what reaches it, leaves half
// as many, but took 1.6 times as long in float32: by then the row has left the caches.

class WideChoice {
 public:
  static constexpr int kEach = kWarp;             // numbers of a stretch that one lane sees
  static constexpr int kStretch = kEach * kWarp;  // loaded together

  // Of a warp.
  struct Shared {
    uint64_t candidates[4 * kWarp];  // ranks, in any order
  };

  // Greatest first, ties to the lower id, NaN last; lane k < K returns the k-th best of
  // value(logit(e), e), e in [0, E). K <= min(E, 32). `nan` is whether a logit is NaN.
  template <class Logit, class Value>
  __device__ static Chosen choose(Shared& shared, const Logit& logit, const Value& value, int32_t E,
                                  int32_t K, bool& nan) {
    const float none = order::from_key(-order::kInfinityBits);
    float lane_best = order::from_key(order::kNaNKey);  // fmaxf leaves a NaN out
    bool lane_nan = false;
    uint64_t last = kNone;  // what does not rank before it is not among the K
    int count = 0;
    for (int32_t e0 = 0; e0 < E; e0 += kStretch) {
      const auto expert = [e0](int i) { return e0 + i * kWarp + lane_index(); };
      float x[kEach];  // loaded before any is looked at
#pragma unroll
      for (int i = 0; i < kEach; ++i) x[i] = expert(i) < E ? logit(expert(i)) : none;
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        lane_nan |= x[i] != x[i];
        if (expert(i) < E) x[i] = value(x[i], expert(i));
        lane_best = fmaxf(lane_best, x[i]);
      }
      const float bound = best_of_lanes(lane_best, K);
      uint32_t reaching = 0;  // this lane's that reach the bound, and its NaNs
#pragma unroll
      for (int i = 0; i < kEach; ++i) reaching |= x[i] < bound ? 0 : 1u << i;
      for (; __any_sync(kAllLanes, reaching != 0); reaching &= reaching - 1) {
        const int32_t e = expert(__ffs(static_cast<int>(reaching)) - 1);
        uint64_t rank = kNone;
        if (reaching != 0 && e < E) rank = order::rank(order::key(value(logit(e), e)), e);
        const bool may_be_chosen = rank < last;
        const unsigned found = __ballot_sync(kAllLanes, may_be_chosen);
        const int place = count + __popc(found & ((1u << lane_index()) - 1));
        if (may_be_chosen) shared.candidates[place] = rank;
        count += __popc(found);
        if (count <= kMaxCandidates - kWarp) continue;
        const uint64_t best = best_candidates(shared, count, K);
        last = __shfl_sync(kAllLanes, best, K - 1);
        if (lane_index() < K) shared.candidates[lane_index()] = best;
        count = K;
      }
    }
    nan = __any_sync(kAllLanes, lane_nan);
    const uint64_t best = best_candidates(shared, count, K);
    return {order::from_key(order::rank_key(best)), order::rank_index(best)};
  }

 private:
  static constexpr int kSlots = 4;
  static constexpr int kMaxCandidates = kSlots * kWarp;
  static constexpr uint64_t kNone = ~uint64_t{0};  // no number's rank

  // The K-th best of the lanes' numbers.
  __device__ static float best_of_lanes(float number, int32_t K) {
    int32_t key = order::key(number), best = 0;
    for (int32_t wanted = K; wanted > 0;) {
      best = __reduce_max_sync(kAllLanes, key);
      wanted -= __popc(__ballot_sync(kAllLanes, key == best));
      if (key == best) key = order::kNaNKey;
    }
    return order::from_key(best);
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
    __syncwarp();  // and may be overwritten (not needed: reductions of what was read follow)
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
