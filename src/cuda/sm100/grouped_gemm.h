// The grouped-GEMM skeleton for tcgen05: persistent, warp-specialised, for any loaders, epilogue and
// tile order.
//
//   producer     four warps: bring k block after k block of both operands into the ring
//   multiplying  one warp: multiplies them into one of two accumulators in tensor memory
//   storing      four warps: finish a tile from the other, each 32 of its rows
//
// Two blocks may be a pair (Shape::kBlocks): they walk the same order side by side, each with its
// rows and its half of B's columns, and the first one's multiplying warp multiplies for both.
//
// All roles walk the same tile order on their own, and go on to the next tile at once:
//
//   producer     | load 6      | load 7      | load 8 ...
//   multiplying  | 4 -> even   | 5 -> even   | 6 -> odd    | 7 -> odd ...       (k blocks)
//   storing      | the tile before, odd      | this tile, even ...
//
//   who tells whom     by                        that
//   producer           bytes and copies landed   a stage is full
//   multiplying        tcgen05.commit            a stage is empty, an accumulator is full
//   storing            an arrival of each warp   an accumulator is empty
//   multiplying, of a pair's second block:
//                      an arrival in the first   a stage is full
//
// What plugs in (load/loader.h and parts.h say what each must have): LoadA, LoadB, Epilogue, Order.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/core/tile.h"
#include "cuda/load/loader.h"
#include "cuda/load/produce.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dynamic_shared.h"
#include "cuda/ptx/elect.h"
#include "cuda/ptx/mbarrier.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/ptx/tcgen05.h"
#include "cuda/ptx/tensor_memory.h"
#include "cuda/ptx/uniform.h"
#include "cuda/schedule/tile_order.h"
#include "cuda/sm100/mma.h"
#include "cuda/sm100/multiply.h"
#include "cuda/sm100/parts.h"
#include "cuda/sm100/ring.h"
#include "cuda/sm100/shape.h"
#include "cuda/sm100/store_tiles.h"

namespace tilemoe::cuda::sm100 {

template <class Shape_, load::Loader LoadA_, load::Loader LoadB_, Epilogue Epilogue_,
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
  };

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M &&
                LoadB::Operand::kRows == Shape::kRowsOfB);
  static constexpr bool kWeightsFirst = false;
  static constexpr bool kThreadsCopy =
      load::copies_by_threads<LoadA> || load::copies_by_threads<LoadB>;
  static constexpr int kTmaBytes = LoadA::kTmaBytes + LoadB::kTmaBytes;
  static constexpr int kFullArrivals = 1 + (kThreadsCopy ? load::kProducerThreads : 0);
  using Products = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;

  // Shared memory: stages (A, B), barriers, the address of tensor memory.
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  static constexpr int kOtherRoom = 256;
  static constexpr int kStages = (kSharedBytes - kOtherRoom) / kStageBytes;
  using Ring = sm100::Ring<kStages, kFullArrivals, 1, Shape::kBlocks>;
  using Accumulators = sm100::Ring<kAccumulators, 1, kStoringWarps, Shape::kBlocks>;
  static constexpr int kRingAt = kStages * kStageBytes;
  static constexpr int kAccumulatorsAt = kRingAt + Ring::kBarrierBytes;
  static constexpr int kTensorMemoryAt = kAccumulatorsAt + Accumulators::kBarrierBytes;
  static constexpr int kSharedBytesUsed = kTensorMemoryAt + static_cast<int>(sizeof(uint32_t));
  static_assert(kStages >= 3, "fewer stages do not hide the latency of memory");
  static_assert(kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0);
};

template <class Gemm>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, kSwizzleAtom);
  const uint32_t shared = ptx::shared_address(memory);
  const typename Gemm::Ring ring(shared + Gemm::kRingAt);
  const typename Gemm::Accumulators accumulators(shared + Gemm::kAccumulatorsAt);
  const int32_t warp = ptx::uniform(static_cast<int32_t>(threadIdx.x) / kWarp);
  constexpr int kBlocks = Gemm::Shape::kBlocks;
  const bool is_first = blockIdx.x % kBlocks == 0;
  const auto sync = [] {
    if constexpr (kBlocks > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  };
  if (threadIdx.x == 0) {
    constexpr int kOthers = kBlocks - 1;
    ring.init(is_first ? kOthers : 0, 0);
    accumulators.init(0, is_first ? kOthers * kStoringWarps : 0);
    ptx::fence_mbarrier_init();
    typename Gemm::LoadA(params.a, 0).prefetch();
    typename Gemm::LoadB(params.b, 0).prefetch();
  }
  if constexpr (kBlocks > 1) sync();  // a pair allocates together: both must run
  if (warp == kMultiplyingWarp) {
    ptx::tensor_memory_allocate<kTensorMemoryColumns, kBlocks>(shared + Gemm::kTensorMemoryAt);
    ptx::tensor_memory_relinquish<kBlocks>();
    ptx::tcgen05_fence_before_sync();  // (not needed: to allocate is no asynchronous access)
  }
  wait_for_previous();
  __syncthreads();
  ptx::tcgen05_fence_after_sync();  // (not needed: nothing asynchronous came before)
  const auto tensor_memory = *reinterpret_cast<const uint32_t*>(memory + Gemm::kTensorMemoryAt);

  if (warp < kFirstStoringWarp) {
    load::produce<Gemm>(
        params, ring, shared, [warp] { return warp == 0 && ptx::elect_one(); },
        [](const auto& /*at*/, const Tile& /*tile*/) {});
  } else if (warp < kMultiplyingWarp) {
    store_tiles<Gemm>(params, accumulators,
                      tensor_memory + (warp - kFirstStoringWarp) * kWarp * kLane);
    ptx::tcgen05_fence_before_sync();  // (not needed: every tile's store ends with one)
  } else if (is_first) {
    multiply_tiles<Gemm>(params, ring, accumulators, shared, tensor_memory);
  } else {
    if constexpr (kBlocks > 1) tell_of_stages<Gemm>(params, ring);
  }

  // Every accumulator has been read, and every product before that was done. Nobody arrives in the
  // other block any more.
  sync();
  if (warp == kMultiplyingWarp) {
    ptx::tcgen05_fence_after_sync();
    ptx::tensor_memory_free<kTensorMemoryColumns, kBlocks>(tensor_memory);
  }
}

}  // namespace tilemoe::cuda::sm100
