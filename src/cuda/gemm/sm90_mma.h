// A stage's products by wgmma: what an arch calls its Mma.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/load/operand.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::sm90 {

// Of one consumer's rows of a tile, in float32.
template <class Shape>
using Accumulators = AccumulatorFragments<Shape::kFragments, Shape::BLOCK_N>;

// A staged operand as wgmma reads it: by descriptors.
template <class Operand>
__device__ __forceinline__ uint64_t descriptor(uint32_t shared) {
  return ptx::wgmma_descriptor(shared, Operand::kAtomBytes,
                               Operand::kMajor == Major::kK ? 16 : Operand::kChunkBytes);
}
// A descriptor moved by `bytes`, which never leave its 18 bits of address.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}

// Of a consumer's rows. A and B are operands as they lie in a stage, one after the other.
template <class Shape, class A, class B>
class Mma {
 public:
  static constexpr int kK = 16;  // steps of the sum that an instruction takes

  // `shared` is the first stage; `first_row` the consumer's first of A.
  __device__ Mma(uint32_t shared, int32_t first_row)
      : a_(descriptor<A>(shared + first_row * A::kRowBytes)),
        b_(descriptor<B>(shared + A::kBytes)) {}

  // D += the products of the stage that begins `stage` bytes after the first, which are under way
  // as one group when it returns; `overwrites` D instead.
  __device__ __forceinline__ void multiply(Accumulators<Shape>& D, uint32_t stage,
                                           bool overwrites) const {
    // 64 rows of A are 8 KiB either way: 64 rows of 128 bytes, or one chunk.
    constexpr int kFragmentBytes = 64 * A::kRowBytes;
    pin(D);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < Shape::BLOCK_K / kK; ++step)
#pragma unroll
      for (int m = 0; m < Shape::kFragments; ++m)
        ptx::wgmma<typename Shape::Element, Shape::BLOCK_N, A::kMajor, B::kMajor>(
            D[m], advance(a_, stage + m * kFragmentBytes + step * A::kStepBytes),
            advance(b_, stage + step * B::kStepBytes), !overwrites || step != 0);
    ptx::wgmma_commit();
  }

  // Until at most kPending groups are under way.
  template <int kPending>
  __device__ static void wait() {
    ptx::wgmma_wait<kPending>();
  }
  // The same of all; D may be read then.
  __device__ __forceinline__ static void finish(Accumulators<Shape>& D) {
    ptx::wgmma_wait<0>();
    pin(D);
  }

 private:
  __device__ __forceinline__ static void pin(Accumulators<Shape>& D) {
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
      for (float& number : D[m]) ptx::pin(number);
  }

  uint64_t a_, b_;
};

}  // namespace tilemoe::cuda::sm90
