// The grouped-GEMM skeleton for mma.sync: persistent; every warp copies, multiplies and stores, for
// any loaders, epilogue and tile order.
//
// (A warp that only copies would be the third of its scheduler. Registers are shared out by
// scheduler, so all warps would have 168, and a warp's 64 by 64 products take 192.)
//
// A stage that every warp has read is filled again beside the next k block's products, across the
// borders of tiles: the next tile's operands land while this one's results are stored.
//
//   copies       | . 3 . .       | . 4 . .       | . 5 ...
//   products     | 0 0 0 0       | 1 1 1 1       | 2 2 2 2 ...        (steps of 16 of the sum)
//   fragments    | 0 0 0   1       1 1   2         2 2   3
//
// A step's fragments are read while the step before it is multiplied. Warps wait for stages alone,
// never for each other: while one copies, stores or waits, the other of its scheduler multiplies.
//
// What plugs in (parts.h says what each must have): LoadA, LoadB, Epilogue, Order.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/core/rows_in_order.h"
#include "cuda/core/tile.h"
#include "cuda/ptx/dynamic_shared.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/ptx/uniform.h"
#include "cuda/schedule/tile_order.h"
#include "cuda/sm80/load_ahead.h"
#include "cuda/sm80/mma.h"
#include "cuda/sm80/parts.h"
#include "cuda/sm80/ring.h"
#include "cuda/sm80/shape.h"
#include "cuda/sm80/tile_line.h"

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

  // Where rows are few, tiles are waited for rather than multiplied. A block that has its
  // multiprocessor to itself has to keep as much under way as memory brings meanwhile: some 70 KiB.
  static constexpr int kMostStages = Shape::kFewRows ? 12 : 4;
  // Blocks that a multiprocessor's registers hold at a time, or of few rows, whose stages are enough.
  static constexpr int kBlocksAtOnce = Shape::kThreads == 128 ? 2 : Shape::kThreads < 128 ? 4 : 1;
  static constexpr bool kWeightsFirst = Shape::kFewRows && rows_in_order<LoadA>;

  // Shared memory: the tiles under way, barriers, stages (A, B).
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  using Ring = sm80::Ring<kStageBytes, Shape::kThreads / kWarp, kMostStages>;
  using Line = TileLine<Order, kMostStages>;
  static constexpr int kOtherBytes =
      (Ring::kBarrierBytes + static_cast<int>(sizeof(Line)) + kSwizzleAtom - 1) / kSwizzleAtom *
      kSwizzleAtom;
  static constexpr int shared_bytes(int stages) { return kOtherBytes + stages * kStageBytes; }
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0);
};

template <class Gemm>
__global__ void __launch_bounds__(Gemm::Shape::kThreads, Gemm::kBlocksAtOnce)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  using Shape = typename Gemm::Shape;
  using Products = typename Gemm::Products;
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, kSwizzleAtom);
  auto& line = *reinterpret_cast<typename Gemm::Line*>(memory);
  const typename Gemm::Ring ring(ptx::shared_address(memory + Gemm::kOtherBytes), params.stages);
  if (threadIdx.x == 0) {
    ring.init();
    line.init();
  }
  if constexpr (!Gemm::kWeightsFirst) wait_for_previous();
  __syncthreads();

  const Products products;
  const typename Gemm::Epilogue epilogue(params.epilogue);
  LoadAhead<Gemm> ahead(params, line);
  // With stages to spare, warps are two k blocks apart before one waits for another to have read.
  const int32_t first = params.stages > 3 ? 2 : 1;
  if constexpr (Gemm::kWeightsFirst)
    ahead.copy_weights_first(ring, params.stages - first);
  else
    for (int32_t i = first; i < params.stages; ++i) ahead.copy_next(ring);

  RingPosition at;
  Accumulators<Shape> D;
  typename Products::Fragments fragments[2];
  static_assert(Products::kSteps == 4);
  for (LinePosition now;; line.advance(now)) {
    const int32_t k_blocks = line.tile(now).k_blocks;
    if (k_blocks == kNoTile) break;
    clear<Shape>(D);
    if (ptx::uniform(epilogue.wants(line.tile(now)))) {
      ring.wait_full(at);
      products.load(fragments[0], ring.address(at), 0);
      for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
        const uint32_t stage = ring.address(at);
        products.load(fragments[1], stage, 1);
        Products::multiply(D, fragments[0]);
        ahead.copy(ring);
        products.load(fragments[0], stage, 2);
        Products::multiply(D, fragments[1]);
        products.load(fragments[1], stage, 3);
        ring.release(at);
        ring.advance(at);
        // The next tile's are read when this one is stored, and registers free.
        const bool ends = k_block + 1 == k_blocks;
        ahead.advance(ring);
        Products::multiply(D, fragments[0]);
        if (!ends) {
          ring.wait_full(at);
          products.load(fragments[0], ring.address(at), 0);
        }
        Products::multiply(D, fragments[1]);
        ahead.find_tile();
      }
    } else {
      for (int32_t k_block = 0; k_block < k_blocks; ++k_block) {
        ring.wait_full(at);
        ring.release(at);
        ahead.copy_next(ring);
        ring.advance(at);
      }
    }
    epilogue.store(D, line.tile(now));
  }
}

}  // namespace tilemoe::cuda::sm80
