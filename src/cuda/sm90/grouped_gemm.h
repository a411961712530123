// The grouped-GEMM skeleton: persistent, warp-specialised, for any loaders, epilogue and tile
// order.
//
//   producer     one warpgroup: brings k block after k block of both operands into the ring
//   consumers    two warpgroups: multiply, then hand float32 accumulators to the epilogue
//
// All roles walk the same tile order on their own. In the steady state the ring is full, a stage is
// refilled as soon as its readers are done with it, across the borders of tiles, and one group of
// products is always under way while the next stage is waited for:
//
//   producer     | load 4        | load 5        | load 6 ...
//   consumer     | mma 0 | mma 1, release 0 | mma 2, release 1 | ... | epilogue | mma ...
//
// An epilogue may hold what it stores in registers, and store it beside the next tile's first
// products.
//
// What plugs in (parts.h says what each must have): LoadA, LoadB, Epilogue, Order.
#pragma once

#include <cstdint>

#include "cuda/core/early_launch.h"
#include "cuda/core/rows_in_order.h"
#include "cuda/core/tile.h"
#include "cuda/ptx/cluster.h"
#include "cuda/ptx/dynamic_shared.h"
#include "cuda/ptx/registers.h"
#include "cuda/ptx/shared_address.h"
#include "cuda/schedule/tile_order.h"
#include "cuda/sm90/consume.h"
#include "cuda/sm90/epilogue_blocks.h"
#include "cuda/sm90/mma.h"
#include "cuda/sm90/parts.h"
#include "cuda/sm90/produce.h"
#include "cuda/sm90/ring.h"
#include "cuda/sm90/shape.h"

namespace tilemoe::cuda::sm90 {

template <class Shape_, load::Loader LoadA_, load::Loader LoadB_, EpilogueOf<Shape_> Epilogue_,
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

  static_assert(LoadA::Operand::kRows == Shape::BLOCK_M && LoadB::Operand::kRows == Shape::BLOCK_N);
  static constexpr bool kThreadsCopy =
      load::copies_by_threads<LoadA> || load::copies_by_threads<LoadB>;
  static constexpr int kTmaBytes = LoadA::kTmaBytes + LoadB::kTmaBytes;
  static constexpr int kFullArrivals = 1 + (kThreadsCopy ? kWarpgroup : 0);
  static constexpr bool kWeightsFirst = Shape::kFewRows && rows_in_order<LoadA>;
  static constexpr int kReadingWarps = Shape::kReaders * kWarpgroup / kWarp;

  // Shared memory: stages (A, B), the consumers' epilogues, barriers.
  static constexpr int kStageBytes = LoadA::Operand::kBytes + LoadB::Operand::kBytes;
  static constexpr int kEpilogueBytes = kConsumers * Epilogue::kSharedBytes;
  static constexpr int kBarrierRoom = 256;
  static constexpr int kStages = (kSharedBytes - kEpilogueBytes - kBarrierRoom) / kStageBytes;
  using Ring = sm90::Ring<kStages, kFullArrivals, kReadingWarps, Shape::kCluster>;
  using Blocks = EpilogueBlocks<Ring, kStageBytes>;
  using Products = Mma<Shape, typename LoadA::Operand, typename LoadB::Operand>;
  static_assert(Shape::BLOCK_K % Products::kK == 0);
  static constexpr int kEpilogueAt = kStages * kStageBytes;
  static constexpr int kBarriersAt = kEpilogueAt + kEpilogueBytes;
  static constexpr int kSharedBytesUsed = kBarriersAt + Ring::kBarrierBytes;
  static_assert(Ring::kBarrierBytes <= kBarrierRoom && kSharedBytesUsed <= kSharedBytes);
  static_assert(LoadA::Operand::kBytes % kSwizzleAtom == 0 && kStageBytes % kSwizzleAtom == 0 &&
                Epilogue::kSharedBytes % kSwizzleAtom == 0);
};

template <class Gemm>
__global__ void __launch_bounds__(kBlockThreads, 1)
    grouped_gemm(const __grid_constant__ typename Gemm::Params params) {
  TILEMOE_DYNAMIC_SHARED(uint8_t, memory, kSwizzleAtom);
  const uint32_t shared = ptx::shared_address(memory);
  const typename Gemm::Ring ring(shared + Gemm::kBarriersAt);
  if (threadIdx.x == 0) {
    ring.init();
    typename Gemm::LoadA(params.a, 0).prefetch();
    typename Gemm::LoadB(params.b, 0).prefetch();
    if constexpr (ReadsThroughRing<typename Gemm::Epilogue>)
      typename Gemm::Epilogue::Load(params.epilogue).prefetch();
  }
  if constexpr (!Gemm::kWeightsFirst) wait_for_previous();
  // The other block of the cluster copies into this one's memory and arrives at its barriers.
  const auto sync = [] {
    if constexpr (Gemm::Shape::kCluster > 1)
      ptx::cluster_sync();
    else
      __syncthreads();
  };
  sync();

  // Uniform over the warp, and known to be so.
  const int32_t warpgroup =
      __shfl_sync(0xffffffff, static_cast<int32_t>(threadIdx.x) / kWarpgroup, 0);
  if (warpgroup == 0) {
    ptx::release_registers<kProducerRegisters>();
    produce<Gemm>(params, ring, shared);
  } else {
    if constexpr (Gemm::kWeightsFirst) wait_for_previous();  // (the producer's wait would do)
    ptx::acquire_registers<kConsumerRegisters>();
    if constexpr (Gemm::Shape::kSchedule == Schedule::kPingPong)
      consume_in_turns<Gemm>(params, ring, shared, warpgroup - 1);
    else
      consume_together<Gemm>(params, ring, shared, warpgroup - 1);
  }
  if constexpr (Gemm::Shape::kCluster > 1) sync();
}

}  // namespace tilemoe::cuda::sm90
