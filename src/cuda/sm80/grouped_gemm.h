// The grouped-GEMM skeleton for mma.sync: persistent, every warp copies, multiplies and stores.
//
// A k block's stage is refilled as soon as every warp has read it, across the borders of tiles, so
// that all stages but one are always under way:
//
//   copies     | 3 -> stage 0   | 4 -> stage 1   | 5 -> stage 2 ...
//   products   | 0 0 0 0        | 1 1 1 1        | 2 2 2 2 ...        (steps of 16 of the sum)
//   fragments  | 0 0 0 . 1        1 1 . 2          2 2 . 3
//
// A step's fragments are read while the step before it is multiplied. Between a k block's last
// fragments and the next one's first lies the one barrier of a k block: past it, the next k block
// has landed for every warp, and nobody reads the stage of this one any more.
//
// What plugs in (parts.h says what each must have): LoadA, LoadB, Epilogue, Order.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/core/tile.h"
#include "cuda/ptx/cp_async.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/sm80/load_ahead.h"
#include "cuda/sm80/mma.h"
#include "cuda/sm80/parts.h"
#include "cuda/sm80/shape.h"

namespace tilemoe::cuda::sm80 {

constexpr int kSwizzleAtom = 1024;  // 8 rows of 128 bytes: what shared tiles are aligned to

template <class Shape_, Loader LoadA_, Loader LoadB_, EpilogueOf<Shape_> Epilogue_,
          TileOrder Order_>
struct GroupedGemm {
  using Shape = Shape_;
  using LoadA = LoadA_;
  using LoadB = LoadB_;
  using Epilogue = Epilogue_;
  using Order = Order_;

  struct Params {
    typename LoadA::Params a;
    typename LoadB::Params b;
    typename Epilogue::Params epilogue;
    typename Order::Params order;
    int32_t stages = 0;  // 2 to kMostStages, as the device's shared memory allows
  };

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M && LoadB::Operand::kRows == Shape::BLOCK_N);
  using Products = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;

  // Shared memory: stages (A, B), then the tiles under way.
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  static constexpr int kTileBytes = sizeof(TileSlots);
  static constexpr int shared_bytes(int stages) { return stages * kStageBytes + kTileBytes; }
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0);

  // Blocks that a multiprocessor's registers hold at a time.
  static constexpr int kBlocksAtOnce = 256 / Shape::kThreads < 1 ? 1 : 256 / Shape::kThreads;
};

// The stages of a block, one after the other.
template <class Gemm>
class Stages {
 public:
  __device__ Stages(uint32_t shared, int32_t count)
      : first_(shared), end_(shared + count * Gemm::kStageBytes), at_(shared), count_(count) {}

  __device__ uint32_t at() const { return at_; }
  __device__ void advance() {
    at_ += Gemm::kStageBytes;
    if (at_ == end_) at_ = first_;
  }
  // Until the k block `further` ones after this has landed, as far as this thread copied it; with
  // it all but the last of those that are under way.
  __device__ void wait(int32_t further) const {
    static_assert(kMostStages == 4);
    switch (count_ - further) {
      case 1: return ptx::cp_async_wait<0>();
      case 2: return ptx::cp_async_wait<1>();
      case 3: return ptx::cp_async_wait<2>();
      default: return ptx::cp_async_wait<3>();
    }
  }

 private:
  uint32_t first_, end_, at_;
  int32_t count_;
};

template <class Shape>
__device__ __forceinline__ void clear(Accumulators<Shape>& D) {
#pragma unroll
  for (auto& slab : D)
#pragma unroll
    for (float& number : slab) number = 0.f;
}

template <class Gemm>
__global__ void __launch_bounds__(Gemm::Shape::kThreads, Gemm::kBlocksAtOnce)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  using Shape = typename Gemm::Shape;
  using Products = typename Gemm::Products;
  extern __shared__ __align__(kSwizzleAtom) uint8_t memory[];
  TileSlots& slots = *reinterpret_cast<TileSlots*>(memory + params.stages * Gemm::kStageBytes);
  wait_for_previous();

  const Products products;
  const typename Gemm::Epilogue epilogue(params.epilogue);
  Stages<Gemm> stages(ptx::shared_address(memory), params.stages);
  LoadAhead<Gemm> ahead(params, slots);
  for (int32_t i = 0; i < params.stages; ++i) {
    ahead.copy(stages.at());
    stages.advance();
  }
  stages.wait(0);
  __syncthreads();

  Accumulators<Shape> D;
  typename Products::Fragments fragments[2];
  for (int slot = 0;; slot = next_slot(slot)) {
    const int32_t k_blocks = slots[slot].k_blocks;
    if (k_blocks == kNoTile) break;
    clear<Shape>(D);
    products.load(fragments[0], stages.at(), 0);
    for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
#pragma unroll
      for (int step = 0; step < Products::kSteps; ++step) {
        if (step + 1 < Products::kSteps) {
          products.load(fragments[(step + 1) % 2], stages.at(), step + 1);
          Products::multiply(D, fragments[step % 2]);
        } else {
          const uint32_t read = stages.at();
          stages.wait(1);
          __syncthreads();
          stages.advance();
          // The last one's are read when the tile is stored, and registers free.
          if (k_block + 1 < k_blocks) products.load(fragments[0], stages.at(), 0);
          // Before the copies: all warps are here at one time, and would leave the tensor cores idle.
          Products::multiply(D, fragments[step % 2]);
          ahead.copy(read);
        }
      }
    }
    epilogue.store(D, slots[slot]);
  }
}

}  // namespace tilemoe::cuda::sm80
