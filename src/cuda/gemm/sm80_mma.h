// The MMAs of a stage by mma.sync, with fragments read by ldmatrix.
#pragma once

#include <cstdint>

#include "cuda/core/fragment.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/gemm/schedule/tile.h"
#include "cuda/ptx/copy.h"
#include "cuda/ptx/mma_sync.h"

namespace tilemoe::cuda::sm80 {

// A warp's part of a tile, in float32.
template <class Shape>
using Accumulators = AccumulatorFragments<Shape::kFragments, Shape::kWarpColumns>;

template <class Shape>
__device__ __forceinline__ void clear(Accumulators<Shape>& D) {
#pragma unroll
  for (auto& fragment : D)
#pragma unroll
    for (float& number : fragment) number = 0.f;
}

// The addresses at which a lane reads kCount fragments of an operand in a stage; a fragment has 16
// rows. One ldmatrix reads four 8x8 blocks. A: the upper and lower 8 rows at the first 8 steps of
// K, then at the last 8. B, of which an MMA takes 8 rows: both halves of K of the first 8 rows,
// then of the next 8.
template <class Operand, int kCount, bool kIsA, int kStepBytes>
class FragmentPlaces {
 public:
  // `first_row` is the warp's first row of the operand.
  __device__ explicit FragmentPlaces(int32_t first_row) {
    const uint32_t lane = threadIdx.x % kWarp, eight = lane & 7;
    const uint32_t second = lane / 8 % 2, third = lane / 16;  // halves of the four blocks
    const uint32_t row_half = kIsA ? second : third, sum_half = kIsA ? third : second;
    if constexpr (Operand::kMajor == Major::kK) {
      offset_[0] =
          (first_row + row_half * 8 + eight) * Operand::kRowBytes + ((sum_half ^ eight) * 16);
    } else {
#pragma unroll
      for (int n = 0; n < kOffsets; ++n) {
        const uint32_t row = first_row + 16 * n;
        offset_[n] = row / 64 * Operand::kChunkBytes + (sum_half * 8 + eight) * Operand::kRowBytes +
                     (((row % 64 / 8 + row_half) ^ eight) * 16);
      }
    }
  }

  // Reads fragment `number` of the stage's 16 steps `step` of K.
  __device__ __forceinline__ void load(uint32_t (&fragment)[4], uint32_t stage, int step,
                                       int number) const {
    // The swizzle is an exclusive or of bits that no other term of the address has.
    if constexpr (Operand::kMajor == Major::kK)
      ptx::ldmatrix_x4(fragment, ((stage + offset_[0]) ^ step * kStepBytes) +
                                     number * (16 * Operand::kRowBytes));
    else if constexpr (kOffsets == 1)
      ptx::ldmatrix_x4_transposed(fragment,
                                  ((stage + offset_[0]) ^ number * 32) + step * kStepBytes);
    else
      ptx::ldmatrix_x4_transposed(fragment, stage + offset_[number] + step * kStepBytes);
  }

 private:
  // One offset suffices if all rows lie in one chunk of 64.
  static constexpr int kOffsets =
      Operand::kMajor == Major::kK || 64 % (16 * kCount) == 0 ? 1 : kCount;

  uint32_t offset_[kOffsets];
};

// The MMAs of one warp. A and B are the operands of a stage, one after the other.
template <class Shape, class A, class B>
class Mma {
 public:
  static constexpr int kSteps = Shape::BLOCK_K / Shape::Recipe::kMmaK;

  // The fragments of one step: the warp's rows of A, and its columns, which are rows of B.
  struct Fragments {
    uint32_t a[Shape::kFragments][4];
    uint32_t b[Shape::kWarpColumns / 16][4];
  };

  __device__ Mma() : a_(Shape::fragment_row(0)), b_(Shape::fragment_column()) {}
  template <class Params>
  __device__ explicit Mma(const Params& /*of_b*/) : Mma() {}

  // Called before the fragments of a tile's first k block are loaded, and of each next one.
  __device__ static void begin(const Tile& /*tile*/) {}
  __device__ static void next_block() {}

  __device__ __forceinline__ void load(Fragments& to, uint32_t stage, int step) const {
    load_a(to, stage, step);
    load_b(to, stage, step);
  }
  __device__ __forceinline__ void load_a(Fragments& to, uint32_t stage, int step) const {
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m) a_.load(to.a[m], stage, step, m);
  }
  __device__ __forceinline__ void load_b(Fragments& to, uint32_t stage, int step) const {
#pragma unroll
    for (int n = 0; n < Shape::kWarpColumns / 16; ++n) b_.load(to.b[n], stage + A::kBytes, step, n);
  }

  // D += A B of one step.
  __device__ __forceinline__ static void multiply(Accumulators<Shape>& D, const Fragments& of) {
#pragma unroll
    for (int m = 0; m < Shape::kFragments; ++m)
#pragma unroll
      for (int j = 0; j < Shape::kWarpColumns / 8; ++j) {
        // Back and forth, so that consecutive MMAs share an operand.
        const int n = m % 2 == 0 ? j : Shape::kWarpColumns / 8 - 1 - j;
        const uint32_t b[2] = {of.b[n / 2][n % 2 * 2], of.b[n / 2][n % 2 * 2 + 1]};
        ptx::mma_m16n8k16(reinterpret_cast<float(&)[4]>(D[m][4 * n]), of.a[m], b,
                          typename Shape::Element());
      }
  }

 private:
  template <class Operand>
  static constexpr int kStepBytes = Operand::step_bytes(Shape::Recipe::kMmaK,
                                                        sizeof(typename Shape::Element));

  FragmentPlaces<A, Shape::kFragments, true, kStepBytes<A>> a_;
  FragmentPlaces<B, Shape::kWarpColumns / 16, false, kStepBytes<B>> b_;
};

// The MMAs of loaders: of values in both operands, unless a loader has codes (sm80_codes_mma.h).
template <class Shape, class LoadA, class LoadB>
struct MmaOf {
  using type = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;
};

}  // namespace tilemoe::cuda::sm80
