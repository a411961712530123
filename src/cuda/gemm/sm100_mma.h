// A stage's products by tcgen05.mma: what an arch calls its Mma.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/fragment.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/operand.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm100 {

// Of a tile, or of the tiles of a CTA pair. A and B are operands as they lie in a block's
// stage, one after the other.
template <class Shape, class A, class B>
class Mma {
 public:
  static constexpr int kK = Shape::Recipe::kMmaK;  // of an instruction
  static constexpr int kStepA = A::step_bytes(kK, sizeof(typename Shape::Element));
  static constexpr int kStepB = B::step_bytes(kK, sizeof(typename Shape::Element));
  static_assert(Shape::BLOCK_K % kK == 0);

  // `shared` is the first stage.
  __device__ explicit Mma(uint32_t shared)
      : a_(descriptor<A>(shared)), b_(descriptor<B>(shared + A::kBytes)) {}

  // D += the products of the stage that begins `stage` bytes after the first, which are under way
  // when it returns; `overwrites` D instead. By one thread.
  __device__ __forceinline__ void multiply(uint32_t D, uint32_t stage, bool overwrites) const {
#pragma unroll
    for (int step = 0; step < Shape::BLOCK_K / kK; ++step)
      ptx::tcgen05_mma_f16<Shape::kCtas>(D, advance(a_, stage + step * kStepA),
                                         advance(b_, stage + step * kStepB), kInstruction,
                                         !overwrites || step != 0);
  }

 private:
  static_assert(std::is_same_v<typename Shape::Recipe::A, typename Shape::Recipe::B>);
  static constexpr tilemoe_dtype kDType = kDTypeOf<typename Shape::Element>;
  static_assert(kDType == TILEMOE_BFLOAT16 || kDType == TILEMOE_FLOAT16);
  static constexpr ptx::MmaFormat format_of(tilemoe_dtype dtype) {
    return dtype == TILEMOE_BFLOAT16 ? ptx::MmaFormat::kBF16 : ptx::MmaFormat::kF16;
  }
  static constexpr uint32_t kInstruction = ptx::tcgen05_instruction(
      format_of(kDType), Shape::kCtas* Shape::BLOCK_M, Shape::BLOCK_N, A::kMajor, B::kMajor);

  template <class Operand>
  __device__ static uint64_t descriptor(uint32_t shared) {
    return ptx::tcgen05_descriptor(shared, Operand::kAtomBytes,
                                   Operand::kMajor == Major::kK ? 16 : Operand::kChunkBytes);
  }
  // A descriptor moved by `bytes`, which never leave its 18 bits of address.
  __device__ static uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
  }

  uint64_t a_, b_;
};

// A storing warp's rows of a tile in tensor memory, which an epilogue pulls into registers some
// columns at a time: a whole tile has no room there.

constexpr uint32_t kLane = 1u << 16;  // in addresses of tensor memory

// Columns that an epilogue has in registers at a time: a group of ds.
constexpr int kBatchColumns = 64;

// A batch of columns of one of a warp's fragments.
using Batch = AccumulatorFragments<1, kBatchColumns>;

class WarpAccumulators {
 public:
  // `address` of the warp's first lane and the tile's first column.
  __device__ explicit WarpAccumulators(uint32_t address) : address_(address) {}

  // Begins to bring kColumns columns of fragment m, from `column` on. All lanes of the warp call
  // it, and land() before the numbers are used.
  template <int kColumns>
  __device__ __forceinline__ void pull(int m, int32_t column, float* numbers) const {
    static_assert(kColumns % kLoad == 0);
#pragma unroll
    for (int c = 0; c < kColumns; c += kLoad)
      ptx::tensor_memory_load_16x32(numbers + c / 2,
                                    address_ + m * fragment::kRows * kLane + column + c);
  }
  // Waits for what was pulled into these fragments, and keeps uses of them behind that.
  template <int kFragments, int kNumbers>
  __device__ __forceinline__ static void land(float (&fragments)[kFragments][kNumbers]) {
    ptx::tensor_memory_wait_loads();
#pragma unroll
    for (auto& fragment : fragments)
#pragma unroll
      for (float& number : fragment) ptx::pin(number);
  }

  // Columns of fragment m from `column` on, as many as a batch has.
  __device__ __forceinline__ void read(int m, int32_t column, Batch& batch) const {
    pull<kBatchColumns>(m, column, batch[0]);
    land(batch);
  }

 private:
  static constexpr int kLoad = 32;  // columns of an instruction

  uint32_t address_;
};

}  // namespace tilemoe::cuda::sm100
