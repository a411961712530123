// The second source of a GEMM of the fp8 recipe, an adapter's rows and factor in 16 bits: k blocks
// of 64 of their columns, in stages of the bytes of 128 codes.
#pragma once

#include <cstdint>

#include "cuda/core/recipe.h"
#include "cuda/gemm/load/chained.h"
#include "cuda/gemm/sm90.h"
#include "cuda/gemm/sm90_fp8.h"
#include "cuda/gemm/sm90_promoted.h"

namespace tilemoe::cuda::sm90 {

// The tile in 16 bits that loads an adapter's operands; of a tile in 16 bits, the tile itself.
template <class Shape>
struct AdapterShapeOf {
  using type = Shape;
};
template <class Sixteen, TileConfiguration kTile>
struct AdapterShapeOf<TileShape<E4m3Blocks<Sixteen>, kTile>> {
  using type = TileShape<SixteenBit<Sixteen>, kTile>;
};

// Promoted for the k blocks of codes. The sum of an adapter's k block has no scale. It has all steps,
// also those past the rank, which add zeros: with fewer, ptxas spilled 376 bytes, and wgmma that
// adds to D was serialised; with a wait ahead up to 592 bytes.
template <class LoadA, class LoadB>
class PromotedWithAdapter : public Promoted<typename LoadA::First, typename LoadB::First, false> {
  using Base = Promoted<typename LoadA::First, typename LoadB::First, false>;
  using Sixteen = typename LoadB::First::Shape::Recipe::Out::Y;
  struct FirstParams {
    const typename LoadA::First::Params& a;
    const typename LoadB::First::Params& b;
  };

 public:
  template <class Params>
  __device__ PromotedWithAdapter(float (&D)[1][kFp8Tile], const Params& params, const Tile& tile,
                                 uint32_t shared, int32_t first_row)
      : Base(D, FirstParams{params.a.first, params.b.first}, tile, shared, first_row),
        first_blocks_(params.a.first_blocks) {}

  template <class Mma, class WaitAhead>
  __device__ __forceinline__ void add(float (&D)[1][kFp8Tile], const Mma& mma, uint32_t stage,
                                      int32_t k_block, int32_t steps, const WaitAhead& wait_ahead) {
    if (k_block < first_blocks_) {
      Base::add(D, mma, stage, k_block, steps, wait_ahead);
    } else {
      add_part<0>(D[0], mma, stage);
      add_part<1>(D[0], mma, stage);
    }
  }

 private:
  template <int kPart, class Mma>
  __device__ __forceinline__ static void add_part(float (&D)[kFp8Tile], const Mma& mma,
                                                  uint32_t stage) {
    constexpr int kNumbers = kFp8Tile / 2;  // of a lane, of 128 columns
    float S[kNumbers];
    mma.template multiply_adapter_part<Sixteen, kPart>(S, stage);
    ptx::wgmma_wait<0>();
#pragma unroll
    for (float& number : S) ptx::pin(number);
#pragma unroll
    for (int i = 0; i < kNumbers; ++i) D[kPart * kNumbers + i] += S[i];
  }

  int32_t first_blocks_;
};

template <class A, class AdapterRows, class B, class Factor>
requires requires {
  typename A::Scales;
  typename B::Scales;
}
struct AccumulateOf<load::Chained<A, AdapterRows>, load::Chained<B, Factor>> {
  using type = PromotedWithAdapter<load::Chained<A, AdapterRows>, load::Chained<B, Factor>>;
};

}  // namespace tilemoe::cuda::sm90
