// A token's choice within one warp. Number e of a row of E lies in lane e % 32, slot e / 32: these
// are the lanes of routing/order.h's sums, so every sum has the bits of the CPU's. For E up to
// 32 * kSlots and K up to 32. Everything here is called by all lanes of a warp; translation units
// compile it without contraction.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/fragment.h"
#include "cuda/kernels/arrays.h"
#include "routing/order.h"

namespace tilemoe::cuda {

static_assert(kWarp == order::kSumLanes);

__device__ __forceinline__ int lane_index() {
  return static_cast<int>(threadIdx.x) % kWarp;
}

// order::add_lanes of the lanes' values, in every lane.
__device__ __forceinline__ float sum_of_lanes(float value) {
#pragma unroll
  for (int half = kWarp / 2; half > 0; half /= 2) value += __shfl_xor_sync(kAllLanes, value, half);
  return value;
}

template <int kSlots>
struct WarpRow {
  float x[kSlots];

  // Past E they are -inf.
  __device__ __forceinline__ void load(const FloatArray& row, int32_t E) {
    switch (row.dtype) {  // outside the loop, so that all loads are under way together
      case TILEMOE_BFLOAT16: return load(static_cast<const BFloat16*>(row.data), E);
      case TILEMOE_FLOAT16: return load(static_cast<const Float16*>(row.data), E);
      default: return load(static_cast<const float*>(row.data), E);
    }
  }

  __device__ __forceinline__ bool any_nan() const {
    bool nan = false;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) nan |= x[s] != x[s];
    return __any_sync(kAllLanes, nan);
  }

  // Sum over all E of softmax_weight(x, max), in every lane.
  __device__ __forceinline__ float softmax_sum(int32_t E, float max) const {
    WarpRow weights = *this;
    return weights.to_softmax_weights(E, max);
  }

  // Puts these weights in place of x, and returns their sum.
  __device__ __forceinline__ float to_softmax_weights(int32_t E, float max) {
    float sum = 0.f;
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      x[s] = s * kWarp + lane_index() < E ? order::softmax_weight(x[s], max) : 0.f;
      sum += x[s];
    }
    return sum_of_lanes(sum);
  }

 private:
  template <class Logit>
  __device__ __forceinline__ void load(const Logit* row, int32_t E) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int32_t e = s * kWarp + lane_index();
      x[s] = e < E ? to_float(row[e]) : order::from_key(-order::kInfinityBits);
    }
  }
};

// What lane k got: the k-th best.
struct Chosen {
  float value;  // what it was ranked by; any number where that is NaN
  int32_t id;
};

// The numbers of a row as they are still to be chosen. Each lane sorts its own first, so that what
// it offers is always in one register; to look for it anew after each choice took three times as
// many instructions at 8 slots and K = 16.
template <int kSlots>
class WarpChoice {
 public:
  __device__ __forceinline__ WarpChoice(const WarpRow<kSlots>& row, int32_t E) {
    int32_t slot[kSlots];
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int32_t key = order::key(row.x[s]);
      const int32_t ranked = key == order::kNaNKey ? kNaN : key;
      key_[s] = s * kWarp + lane_index() < E ? ranked : kTaken;
      slot[s] = s;
    }
    // By insertion: only neighbours change places, so equal keys keep the order of their ids.
#pragma unroll
    for (int end = 1; end < kSlots; ++end)
#pragma unroll
      for (int s = end; s > 0; --s) {
        const bool exchange = key_[s] > key_[s - 1];
        const int32_t key = key_[s], other = slot[s];
        key_[s] = exchange ? key_[s - 1] : key, key_[s - 1] = exchange ? key : key_[s - 1];
        slot[s] = exchange ? slot[s - 1] : other, slot[s - 1] = exchange ? other : slot[s - 1];
      }
#pragma unroll
    for (int s = 0; s < kSlots; ++s) slots_ |= static_cast<Slots>(slot[s]) << s * kSlotBits;
  }

  // Greatest first, ties to the lower id, NaN last; lane k < K returns the k-th. K <= min(E, 32).
  __device__ __forceinline__ Chosen choose(int32_t K) {
    int32_t mine = 0, my_id = 0;
    for (int32_t k = 0; k < K; ++k) {
      const int32_t key = __reduce_max_sync(kAllLanes, key_[0]);
      const int32_t offered = static_cast<int32_t>(slots_ & kSlotMask) * kWarp + lane_index();
      const int32_t id = __reduce_min_sync(kAllLanes, key_[0] == key ? offered : INT32_MAX);
      if (lane_index() == k) mine = key, my_id = id;
      if (offered == id) take();
    }
    return {order::from_key(mine), my_id};
  }

  // Bit s: whether this lane's slot s was chosen.
  __device__ __forceinline__ uint32_t chosen_slots() const {
    return chosen_;
  }

 private:
  static constexpr int32_t kNaN = -order::kInfinityBits - 1;  // below every number
  static constexpr int32_t kTaken = INT32_MIN;
  static constexpr int kSlotBits = 4;
  static constexpr int kSlotMask = (1 << kSlotBits) - 1;
  static_assert(kSlots <= 1 << kSlotBits);
  using Slots = std::conditional_t<(kSlots * kSlotBits > 32), uint64_t, uint32_t>;

  __device__ __forceinline__ void take() {
    chosen_ |= 1u << static_cast<int>(slots_ & kSlotMask);
#pragma unroll
    for (int s = 1; s < kSlots; ++s) key_[s - 1] = key_[s];
    key_[kSlots - 1] = kTaken;
    slots_ >>= kSlotBits;
  }

  int32_t key_[kSlots];  // of this lane, the greatest first
  Slots slots_ = 0;      // the slots they came from, four bits each
  uint32_t chosen_ = 0;
};

// A token's choice within one warp by 16-bit logits: as float32 their last bits are zeros, so that
// a number's key and its place in the row fit one word. One reduction over the lanes then gives the
// best of a row and its place; WarpChoice takes two.

template <int kSlots>
class PackedChoice {
 public:
  // `row` has 16-bit numbers.
  __device__ __forceinline__ PackedChoice(const WarpRow<kSlots>& row, int32_t E) {
#pragma unroll
    for (int s = 0; s < kSlots; ++s) {
      const int32_t e = s * kWarp + lane_index(), key = order::key(row.x[s]);
      const int32_t ranked = key == order::kNaNKey ? kNaN : key;
      word_[s] = e < E ? ranked + kPlaces - 1 - e : kTaken;
    }
    // Greatest first.
#pragma unroll
    for (int end = 1; end < kSlots; ++end)
#pragma unroll
      for (int s = end; s > 0; --s) {
        const int32_t greater = max(word_[s - 1], word_[s]);
        word_[s] = min(word_[s - 1], word_[s]);
        word_[s - 1] = greater;
      }
  }

  // As WarpChoice's.
  __device__ __forceinline__ Chosen choose(int32_t K) {
    int32_t mine = 0;
    for (int32_t k = 0; k < K; ++k) {
      const int32_t best = __reduce_max_sync(kAllLanes, word_[0]);
      if (lane_index() == k) mine = best;
      if (word_[0] == best) take();
    }
    const int32_t place = mine & (kPlaces - 1);
    return {order::from_key(mine - place), kPlaces - 1 - place};
  }

 private:
  static constexpr int32_t kPlaces = 1 << 13;  // float16 has 10 bits of float32's 23
  static constexpr int32_t kNaN = -order::kInfinityBits - kPlaces;  // below every number
  static constexpr int32_t kTaken = INT32_MIN;
  static_assert(kSlots * kWarp <= kPlaces);

  __device__ __forceinline__ void take() {
#pragma unroll
    for (int s = 1; s < kSlots; ++s) word_[s - 1] = word_[s];
    word_[kSlots - 1] = kTaken;
  }

  // Key and, descending, place of this lane's numbers.
  int32_t word_[kSlots];
};

}  // namespace tilemoe::cuda
