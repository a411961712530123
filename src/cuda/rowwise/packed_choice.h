// A token's choice within one warp by 16-bit logits: as float32 their last bits are zeros, so that
// a number's key and its place in the row fit one word. One reduction over the lanes then tells the
// best of a row and where it stands, where WarpChoice takes two.
#pragma once

#include <cstdint>

#include "cuda/rowwise/warp_choice.h"
#include "routing/order.h"

namespace tilemoe::cuda {

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
