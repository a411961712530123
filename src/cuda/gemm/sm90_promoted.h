// The fp8 recipe's sums on Hopper (core/fp8.h). wgmma keeps fewer bits of a sum of e4m3 than float32
// has, so each k block, which is one block of scales, has a sum of its own, which is scaled and added
// in float32.
#pragma once

#include <cstdint>

#include "core/fp8.h"
#include "cuda/core/fragment.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/gemm/sm90_mma.h"
#include "cuda/gemm/sm90_ring.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::sm90 {

// How a k block enters the accumulators: D += S (scale of the row * scale of the 128 columns), by a
// sum S of 128 columns at a time. While one consumer scales, the other one's MMAs run. `kAhead`:
// during a k block's last MMAs the consumer waits for the next stage and reads its scales, so that
// only FMAs and the start of MMAs lie between its MMAs; otherwise it waits before its first MMAs.
template <class LoadA, class LoadB, bool kAhead = LoadA::kWaitsAhead>
class Promoted {
 public:
  static constexpr int kLag = 0;  // a stage is released when its sums are scaled
  static constexpr bool kWaitsAhead = kAhead;

  template <class Params>
  __device__ Promoted(float (&D)[1][kFp8Tile], const Params& params, const Tile& tile,
                      uint32_t shared, int32_t first_row)
      : rows_(params.a, tile, shared, first_row + LoadB::Shape::fragment_row(0) + fragment::row(0)),
        columns_(params.b, tile) {
#pragma unroll
    for (float& d : D[0]) d = 0.f;
  }

  template <class Mma, class WaitAhead>
  __device__ __forceinline__ void add(float (&D)[1][kFp8Tile], const Mma& mma, uint32_t stage,
                                      int32_t k_block, int32_t /*steps*/,
                                      const WaitAhead& wait_ahead) {
    float S[kNumbers];
    mma.template multiply_part<0>(S, stage);
    if (!kAhead || k_block == 0) read_scales(stage, k_block);
    const float second[2] = {factor_[1][0], factor_[1][1]};
    promote<0>(D[0], S, factor_[0]);
    const auto read_ahead = [&] {
      uint32_t next;
      if constexpr (kAhead)
        if (wait_ahead(next)) read_scales(next, k_block + 1);
    };
    if (columns_.has_second()) {
      mma.template multiply_part<1>(S, stage);
      read_ahead();
      promote<kNumbers>(D[0], S, second);
    } else {
      read_ahead();
    }
    // Every lane has read its rows' scales: the warp may release the stage.
    __syncwarp();
  }
  template <class Mma>
  __device__ __forceinline__ static void wait_for_previous() {}
  template <class Mma, class D>
  __device__ __forceinline__ static void finish(D& /*accumulators*/) {}

 private:
  static constexpr int kNumbers = kFp8Tile / 2;  // of a lane, of 128 columns

  __device__ __forceinline__ void read_scales(uint32_t stage, int32_t k_block) {
    float row[2], column[2];
    columns_.read(k_block, column);
    rows_.read(stage, k_block, row);
#pragma unroll
    for (int part = 0; part < 2; ++part)
#pragma unroll
      for (int i = 0; i < 2; ++i) factor_[part][i] = row[i] * column[part];
  }

  template <int kFirst>
  __device__ __forceinline__ static void promote(float (&D)[2 * kNumbers], float (&S)[kNumbers],
                                                 const float (&factor)[2]) {
    ptx::wgmma_wait<0>();
#pragma unroll
    for (float& number : S) ptx::pin(number);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) D[kFirst + i] = fmaf(S[i], factor[i / 2 % 2], D[kFirst + i]);
  }

  float factor_[2][2];  // of the next k block: by 128 columns, and a lane's two rows
  typename LoadA::Scales rows_;
  typename LoadB::Scales columns_;
};

template <class LoadA, class LoadB>
requires requires {
  typename LoadA::Scales;
  typename LoadB::Scales;
}
struct AccumulateOf<LoadA, LoadB> {
  using type = Promoted<LoadA, LoadB>;
};

}  // namespace tilemoe::cuda::sm90
