// The MMAs of a stage by tcgen05.mma, and a store warp's rows of D in tensor memory.
#pragma once

#include <cstdint>
#include <type_traits>

#include "cuda/core/fragment.h"
#include "cuda/core/recipe.h"
#include "cuda/gemm/load/stage.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/warp.h"

namespace tilemoe::cuda::sm100 {

// The MMAs of one tile, or of both tiles of a CTA pair. A and B are the operands' layouts in a
// stage, where B follows A.
template <class Shape, class A, class B>
class Mma {
 public:
  static constexpr int kK = Shape::Recipe::kMmaK;  // of an instruction
  static constexpr int kStepA = A::step_bytes(kK, sizeof(typename Shape::Element));
  static constexpr int kStepB = B::step_bytes(kK, sizeof(typename Shape::Element));
  static_assert(Shape::BLOCK_K % kK == 0);

  // `shared` is the address of the first stage.
  __device__ explicit Mma(uint32_t shared)
      : a_(descriptor<A>(shared)), b_(descriptor<B>(shared + A::kBytes)) {}

  // Starts D += A B of the stage at `stage` bytes after the first, or D = A B if `overwrites`.
  // Asynchronous; called by one thread.
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
  // Advances a descriptor by `bytes`; the address stays within its 18 bits.
  __device__ static uint64_t advance(uint64_t descriptor, uint32_t bytes) {
    return descriptor + (bytes >> 4);
  }

  uint64_t a_, b_;
};

// A store warp's rows of a tile in tensor memory. An epilogue loads them in batches of columns,
// because a whole tile does not fit into registers.

constexpr uint32_t kLane = 1u << 16;  // one lane in addresses of tensor memory

// Columns that an epilogue has in registers at a time: one group of ds.
constexpr int kBatchColumns = 64;

// A batch of columns of one fragment of a warp.
using Batch = AccumulatorFragments<1, kBatchColumns>;

class WarpAccumulators {
 public:
  // `address`: the warp's first lane and the tile's first column.
  __device__ explicit WarpAccumulators(uint32_t address) : address_(address) {}

  // Starts to load kColumns columns of fragment m, from `column` on. The whole warp calls it, and
  // calls land() before it uses the numbers.
  template <int kColumns>
  __device__ __forceinline__ void pull(int m, int32_t column, float* numbers) const {
    static_assert(kColumns % kLoad == 0);
#pragma unroll
    for (int c = 0; c < kColumns; c += kLoad)
      ptx::tensor_memory_load_16x32(numbers + c / 2,
                                    address_ + m * fragment::kRows * kLane + column + c);
  }
  // Waits for the loads into these fragments; the compiler keeps uses of them after the wait.
  template <int kFragments, int kNumbers>
  __device__ __forceinline__ static void land(float (&fragments)[kFragments][kNumbers]) {
    ptx::tensor_memory_wait_loads();
#pragma unroll
    for (auto& fragment : fragments)
#pragma unroll
      for (float& number : fragment) ptx::pin(number);
  }

  // Loads one batch of columns of fragment m, from `column` on, and waits for it.
  __device__ __forceinline__ void read(int m, int32_t column, Batch& batch) const {
    pull<kBatchColumns>(m, column, batch[0]);
    land(batch);
  }

 private:
  static constexpr int kLoad = 32;  // columns per instruction

  uint32_t address_;
};

}  // namespace tilemoe::cuda::sm100
