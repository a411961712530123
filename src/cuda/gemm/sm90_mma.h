// The MMAs of a stage by wgmma, and how they accumulate.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/warp.h"
#include "cuda/ptx/wgmma.h"

namespace tilemoe::cuda::sm90 {

// At launch each of the 384 threads has 168 of the 65536 registers. The producer releases registers
// and the consumers acquire them: 40 + 2 * 232 = 3 * 168, and 56 + 2 * 224 if the producer has two
// loaders for an operand and loads for the epilogue, too.
struct Registers {
  int producer, consumer;
};
constexpr Registers registers_of(bool two_sources, bool loads_for_epilogue) {
  return two_sources && loads_for_epilogue ? Registers{56, 224} : Registers{40, 232};
}

// One consumer's rows of a tile, in float32.
template <class Shape>
using Accumulators = AccumulatorFragments<Shape::kFragments, Shape::BLOCK_N>;

// The wgmma descriptor of a staged operand.
template <class Operand>
__device__ __forceinline__ uint64_t descriptor(uint32_t shared) {
  return ptx::wgmma_descriptor(shared, Operand::kAtomBytes,
                               Operand::kMajor == Major::kK ? 16 : Operand::kChunkBytes);
}
// Advances a descriptor by `bytes`; the address stays within its 18 bits.
__device__ __forceinline__ uint64_t advance(uint64_t descriptor, uint32_t bytes) {
  return descriptor + (bytes >> 4);
}
// The same by 16-byte chunks, in the low word alone: fewer instructions between MMAs.
__device__ __forceinline__ uint64_t advance_low(uint64_t descriptor, uint32_t chunks) {
  return (descriptor & ~uint64_t{0xffffffff}) | (static_cast<uint32_t>(descriptor) + chunks);
}

// The MMAs of one consumer's rows. A and B are the operands of a stage, one after the other.
template <class Shape, class A, class B>
class Mma {
 public:
  static constexpr int kK = Shape::Recipe::kMmaK;     // of an instruction
  static constexpr int kSteps = Shape::BLOCK_K / kK;  // of a stage
  static_assert(Shape::BLOCK_K % kK == 0);
  static constexpr int kStepA = A::step_bytes(kK, sizeof(typename Shape::Element));
  static constexpr int kStepB = B::step_bytes(kK, sizeof(typename Shape::Element));

  // `shared` is the address of the first stage, `first_row` the consumer's first row of A.
  __device__ Mma(uint32_t shared, int32_t first_row)
      : a_(descriptor<A>(shared + first_row * A::kRowBytes)),
        b_(descriptor<B>(shared + A::kBytes)) {}

  // D += A B^T of `steps` instructions along K of the stage at `stage` bytes after the first;
  // `overwrites`: D = A B^T. All that it has started is in flight on return, as one group, or, of a
  // stage that is not whole, as one group for each of the steps.
  __device__ __forceinline__ void multiply(Accumulators<Shape>& D, uint32_t stage, bool overwrites,
                                           int32_t steps) const {
    if (steps == kSteps) {
      start<kSteps>(D, stage, 0, overwrites);
    } else {
#pragma unroll 1
      for (int32_t step = 0; step < steps; ++step)
        start<1>(D, stage, step, overwrites && step == 0);
    }
  }

  // S = A B^T of the stage's columns [128 kPart, 128 kPart + 128), as one group (e4m3).
  template <int kPart>
  __device__ __forceinline__ void multiply_part(float (&S)[64], uint32_t stage) const {
    for (float& number : S) ptx::pin(number);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::wgmma_e4m3(
          S, advance_low(a_, (stage >> 4) + (step * kStepA >> 4)),
          advance_low(b_, (stage >> 4) + (kPart * 128 * B::kRowBytes + step * kStepB >> 4)),
          step != 0);
    ptx::wgmma_commit();
  }

  // The same of a stage with an adapter's operands, of 16 bits.
  template <class Element, int kPart>
  __device__ __forceinline__ void multiply_adapter_part(float (&S)[64], uint32_t stage) const {
    for (float& number : S) ptx::pin(number);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kSteps; ++step)
      ptx::wgmma<Element, 128, A::kMajor, B::kMajor>(
          S, advance(a_, stage + step * kStepA),
          advance(b_, stage + kPart * 128 * B::kRowBytes + step * kStepB), step != 0);
    ptx::wgmma_commit();
  }

  // Waits until at most kPending groups are in flight.
  template <int kPending>
  __device__ static void wait() {
    ptx::wgmma_wait<kPending>();
  }
  // Waits for all groups; D may be read afterwards.
  __device__ __forceinline__ static void finish(Accumulators<Shape>& D) {
    ptx::wgmma_wait<0>();
    pin(D);
  }

 private:
  // A group of kCount steps.
  template <int kCount>
  __device__ __forceinline__ void start(Accumulators<Shape>& D, uint32_t stage, int32_t first,
                                        bool overwrites) const {
    // 64 rows of A are 8 KiB in both majors: 64 rows of 128 bytes, or one chunk.
    constexpr int kFragmentBytes = 64 * A::kRowBytes;
    pin(D);
    ptx::wgmma_fence();
#pragma unroll
    for (int step = 0; step < kCount; ++step)
#pragma unroll
      for (int m = 0; m < Shape::kFragments; ++m)
        ptx::wgmma<typename Shape::Element, Shape::BLOCK_N, A::kMajor, B::kMajor>(
            D[m], advance(a_, stage + m * kFragmentBytes + (first + step) * kStepA),
            advance(b_, stage + (first + step) * kStepB), !overwrites || step != 0);
    ptx::wgmma_commit();
  }
  __device__ __forceinline__ static void pin(Accumulators<Shape>& D) {
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
      for (float& number : D[m]) ptx::pin(number);
  }

  uint64_t a_, b_;
};

// How the MMAs of a k block enter the accumulators of a tile: wgmma adds to D. (sm90_promoted.h has a
// policy that promotes partial sums.)
struct InPlace {
  static constexpr int kLag = 1;  // a stage is released this many k blocks later
  static constexpr bool kWaitsAhead = false;

  template <class D, class Params>
  __device__ InPlace(const D& /*accumulators*/, const Params& /*params*/, const Tile& /*tile*/,
                     uint32_t /*shared*/, int32_t /*first_row*/) {}

  template <class Mma, class D, class WaitAhead>
  __device__ __forceinline__ static void add(D& accumulators, const Mma& mma, uint32_t stage,
                                             int32_t k_block, int32_t steps,
                                             const WaitAhead& /*wait_ahead*/) {
    mma.multiply(accumulators, stage, k_block == 0, steps);
  }
  // Waits for all groups but the last kLag.
  template <class Mma>
  __device__ __forceinline__ static void wait_for_previous() {
    Mma::template wait<kLag>();
  }
  template <class Mma, class D>
  __device__ __forceinline__ static void finish(D& accumulators) {
    Mma::finish(accumulators);
  }
};

// The policy of a GEMM with these operands.
template <class LoadA, class LoadB>
struct AccumulateOf {
  using type = InPlace;
};

}  // namespace tilemoe::cuda::sm90
