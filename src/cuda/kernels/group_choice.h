// The groups of experts that a token may choose from: by a warp whose registers have the row, or by
// a CTA that reads it again. An expert of another group becomes NaN, and so ranks last.
#pragma once

#include <cstdint>

#include "cuda/kernels/warp_choice.h"
#include "routing/groups.h"

namespace tilemoe::cuda {

// A group has `lanes` lanes of a warp, a power of two: group g those from g * lanes on.
struct GroupLimit {
  int32_t n_group, topk_group;
  int32_t size;   // experts of a group
  int32_t lanes;  // lanes * n_group <= 32
  int32_t steps;  // experts of a lane, at most
  tilemoe_group_score score;

  // Of args that say how groups are chosen.
  template <class Args>
  GroupLimit(const Args& args, int32_t E)
      : n_group(static_cast<int32_t>(args.n_group)),
        topk_group(static_cast<int32_t>(args.topk_group)),
        size(E / n_group),
        lanes(1),
        score(args.group_score) {
    while (2 * lanes * n_group <= kWarp) lanes *= 2;
    steps = (size + lanes - 1) / lanes;
  }
  TILEMOE_HOST_DEVICE bool limits() const { return n_group > 1; }
};

static_assert(kMaxGroups <= kWarp);

__device__ __forceinline__ order::TopTwo top_two_of_lanes(order::TopTwo mine, int32_t lanes) {
  for (int32_t half = lanes / 2; half > 0; half /= 2)
    mine.add(order::TopTwo(__shfl_xor_sync(kAllLanes, mine.best(), half),
                           __shfl_xor_sync(kAllLanes, mine.second(), half)));
  return mine;
}

template <int kSlots>
class WarpGroups {
 public:
  // A warp's copy of the numbers of a row, on 16 bytes.
  static constexpr int kSharedFloats = kSlots * kWarp;

  __device__ __forceinline__ WarpGroups(const GroupLimit& limit, float* shared)
      : limit_(limit), shared_(shared) {
    group_ = lane_index() / limit.lanes;
    offset_ = lane_index() % limit.lanes;
    // Groups begin at different steps: where each has 32 experts, their lanes would all read the
    // same banks.
    start_ = group_ % limit.steps;
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      bit_[s] = (s * kWarp + lane_index()) / limit.size * limit.lanes & 31;
  }

  // Leaves in the row the numbers of the best groups, which has no more than E.
  __device__ __forceinline__ void limit(WarpRow<kSlots>& row) const {
    const uint32_t chosen = best_groups(top_two_of_group(row));
#pragma unroll
    for (int s = 0; s < kSlots; ++s)
      row.x[s] = chosen >> bit_[s] & 1 ? row.x[s] : order::from_key(order::kNaNKey);
  }

 private:
  __device__ __forceinline__ order::TopTwo top_two_of_group(const WarpRow<kSlots>& row) const {
    __syncwarp();  // the previous row has been read (its shuffles alone would order it)
#pragma unroll
    for (int s = 0; s < kSlots; ++s) shared_[s * kWarp + lane_index()] = row.x[s];
    __syncwarp();
    order::TopTwo mine;
    if (kSlots % 4 == 0 && limit_.size == limit_.lanes * kSlots) {
      // Every lane has as many as a row has slots, and they stand side by side.
      const auto* const four = reinterpret_cast<const float4*>(shared_ + lane_index() * kSlots);
#pragma unroll
      for (int i = 0; i < kSlots / 4; ++i) {
        const float4 x = four[i];
        mine.add(x.x), mine.add(x.y), mine.add(x.z), mine.add(x.w);
      }
    } else if (group_ < limit_.n_group) {
      const float* const group = shared_ + group_ * limit_.size;
      int32_t step = start_;
      for (int32_t i = 0; i < limit_.steps; ++i) {
        const int32_t place = offset_ + step * limit_.lanes;
        if (place < limit_.size) mine.add(group[place]);
        step = step + 1 == limit_.steps ? 0 : step + 1;
      }
    }
    return top_two_of_lanes(mine, limit_.lanes);
  }

  // Bit g * lanes: whether group g is among the best. The lanes of a group divide the others among
  // themselves.
  __device__ __forceinline__ uint32_t best_groups(const order::TopTwo& mine) const {
    const int32_t lanes = limit_.lanes, key = mine.key_of(limit_.score);
    int32_t before = 0;
    for (int32_t first = 0; first < limit_.n_group; first += lanes) {
      const int32_t other = first + offset_;
      const int32_t other_key = __shfl_sync(kAllLanes, key, other * lanes);
      if (other < limit_.n_group && order::group_before(other_key, other, key, group_)) ++before;
    }
    for (int32_t half = lanes / 2; half > 0; half /= 2)
      before += __shfl_xor_sync(kAllLanes, before, half);
    return __ballot_sync(kAllLanes, group_ < limit_.n_group && before < limit_.topk_group);
  }

  const GroupLimit& limit_;
  float* shared_;
  int32_t group_, offset_, start_;
  int32_t bit_[kSlots];  // where each slot's group has its own
};

template <int kThreads>
class BlockGroups {
 public:
  struct Shared {
    int32_t keys[kMaxGroups];
    uint32_t best;
  };

  // Bit g: whether group g is among the best by value(e). Called by all threads.
  template <class Value>
  __device__ static uint32_t best_groups(Shared& shared, const GroupLimit& limit,
                                         const Value& value) {
    constexpr int kWarps = kThreads / kWarp;
    const int32_t lane = lane_index();
    for (int32_t g = static_cast<int32_t>(threadIdx.x) / kWarp; g < limit.n_group; g += kWarps) {
      order::TopTwo mine;
      for (int32_t i = lane; i < limit.size; i += kWarp) mine.add(value(g * limit.size + i));
      mine = top_two_of_lanes(mine, kWarp);
      if (lane == 0) shared.keys[g] = mine.key_of(limit.score);
    }
    __syncthreads();
    if (threadIdx.x < kWarp) {
      int32_t before = 0;
      for (int32_t other = 0; lane < limit.n_group && other < limit.n_group; ++other)
        if (order::group_before(shared.keys[other], other, shared.keys[lane], lane)) ++before;
      const uint32_t best =
          __ballot_sync(kAllLanes, lane < limit.n_group && before < limit.topk_group);
      if (lane == 0) shared.best = best;
    }
    __syncthreads();
    return shared.best;
  }
};

}  // namespace tilemoe::cuda
